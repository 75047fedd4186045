"""Sequence parallelism: between the layers of a long step each rank keeps a part of the residual's
rows (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

Behind the first layer a rank drops the rows of others; each norm from there on adds and norms its
own rows, between a reduce-scatter of the branch before it and an all-gather for the products behind
it (layers/norm.py); before the last layer the rows are put together again. So what is sent has the
bytes of the sums over all ranks that stand there else.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.norm import PRE, RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import (
    DecoderLayer,
    DecoderLayerSpec,
    Layer,
    LayerAround,
    LayerSpec,
    Stream,
)
from headrace.back.parallel.collectives import Partial, all_rows, own_rows, sum_of_rows
from headrace.base.errors import ConfigError


def in_parts(layers: list[Layer], scope: Scope, specs: Sequence[DecoderLayerSpec]) -> list[Layer]:
    """The layers, between the first and last of which the rows of long steps are divided, if the
    mesh says so; ConfigError where what a layer adds to the residual is no sum over the ranks."""
    if not scope.mesh.sequence_rows or len(layers) < 2:
        return layers
    if not all(map(adds_shares, specs)) or not all(map(_norms_rows, layers)):
        raise ConfigError(
            "--sequence-parallel: a layer of the model adds to the residual what is no plain sum "
            "over the ranks (a norm or a bias behind it, or another kind of layer): leave it out",
            field="sequence_parallel",
        )
    first, *between, last = layers
    return [FirstLayer(first, scope), *between, LastLayer(last, scope)]


def adds_shares(spec: DecoderLayerSpec) -> bool:
    """Whether both branches of a layer leave shares of a sum."""
    if type(spec) is not LayerSpec or spec.placement != PRE or spec.branch_scale != 1.0:
        return False
    if spec.normed_residual is not None or spec.tail is not None:
        return False
    mixer, mlp = spec.mixer, spec.feed_forward
    if type(mixer) is not AttentionSpec or mixer.out_bias or mixer.out_norm is not None:
        return False
    if type(mlp) is GatedMLPSpec:
        return not (mlp.bias or mlp.down_bias or mlp.inner_norm)
    return type(mlp) is MixtureSpec and not mlp.layout.biased


def _norms_rows(layer: Layer) -> bool:
    """Whether its norms take a residual of some rows."""
    if not isinstance(layer, DecoderLayer):
        return False
    return isinstance(layer.before_attention, RMSNorm) and isinstance(layer.before_mlp, RMSNorm)


class _OfRows(LayerAround):
    def __init__(self, layer: Layer, scope: Scope) -> None:
        super().__init__(layer)
        self._axis, self._least = scope.mesh.tp, scope.mesh.sequence_rows


class FirstLayer(_OfRows):
    """Of the residual behind it each rank keeps its rows."""

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = self._layer.forward(stream, batch, last=last)
        if residual_TE.shape[0] < self._least:
            return branch_TE, residual_TE
        assert isinstance(branch_TE, Partial), "the branch is a share of a sum"
        return branch_TE, own_rows(residual_TE, self._axis)


class LastLayer(_OfRows):
    """Has all rows again."""

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_RE = stream
        num_tokens = batch.token_ids_T.shape[0]
        if residual_RE.shape[0] == num_tokens:
            return self._layer.forward(stream, batch, last=last)
        assert isinstance(branch_TE, Partial), "the branch is a share of a sum"
        residual_RE.add_(sum_of_rows(branch_TE.share, self._axis))
        residual_TE = all_rows(residual_RE, self._axis, num_tokens)
        return self._layer.forward((None, residual_TE), batch, last=last)
