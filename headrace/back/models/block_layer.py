"""A decoder layer over a residual by blocks (layers/block_residual.py): each branch reads a mixture
of the finished blocks and of the one at hand, to which it is added. T tokens, E hidden size, S
blocks and one, N tokens whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.block_residual import BlockMixture, BlockResidualSpec, MixtureNames
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import Branch, total
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import PRE, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream


@dataclass(frozen=True, kw_only=True)
class BlockLayerSpec:
    """Layer `index` of its decoder. `names`: of the mixtures before its branches, the first of
    which layer 0 has not: there is nothing to mix."""

    index: int
    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    residual: BlockResidualSpec
    names: tuple[MixtureNames, MixtureNames]

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> BlockLayer:
        """See DecoderLayerSpec."""
        return BlockLayer(scope, cache, self, sizes, norms)


class BlockLayer:
    """See BlockLayerSpec; the residual of its stream is [S, T, E]."""

    takes_adapters = True
    tail: Tail | None = None

    def __init__(
        self, scope: Scope, cache: int, spec: BlockLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        width, residual = sizes.width, spec.residual
        self._before_attention, self._before_mlp = (
            norms.build(scope / str(name), width, eps=sizes.eps)
            for name in (PRE.before_attention, PRE.before_mlp)
        )
        self._blocks, self._begins = residual.before(spec.index), residual.begins(spec.index)
        of_attention, of_mlp = spec.names
        self._of_attention: BlockMixture | None = None
        if self._blocks:
            self._of_attention = residual.mixture.build(
                scope, of_attention, width, shape=residual.shape
            )
        self._of_mlp = residual.mixture.build(scope, of_mlp, width, shape=residual.shape)
        self.mixer: Mixer[Any] = spec.mixer.build(scope, cache)
        place = FeedForwardPlace(width=width, inner=sizes.inner, activation=sizes.activation)
        self._mlp = spec.feed_forward.build(scope, place)
        self._adapters = scope.adapters
        self.kv_forms = self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer. The residual is changed in place."""
        x_STE, blocks = stream[1], self._blocks
        x_TE = x_STE[0]
        if self._of_attention is not None:
            (x_TE,) = self._of_attention.of(x_STE[: blocks + 1])
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(self._before_attention.norm(x_TE), batch, at_N)
        if after is not None and at_N is not None:
            x_STE, batch = x_STE.index_select(1, at_N), after
            if self._adapters is not None:
                self._adapters.take(after)
        branch_TE = _whole(self.mixer.attend_into(handed, x_STE[0], batch))
        if self._begins:
            blocks += 1
            x_STE[blocks] = x_STE[0]
            x_STE[0] = branch_TE
        else:
            x_STE[0] += branch_TE
        (x_TE,) = self._of_mlp.of(x_STE[: blocks + 1])
        x_STE[0] += _whole(self._mlp.forward_into(self._before_mlp.norm(x_TE), x_TE))
        return None, x_STE


def _whole(branch_TE: Branch) -> torch.Tensor:
    """What a branch gives, summed over the ranks."""
    branch_TE = total(branch_TE)
    assert branch_TE is not None, "a branch that does not add gives its sum"
    return branch_TE
