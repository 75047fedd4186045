"""A decoder layer whose residual is several streams (layers/hyper_connections.py): each branch
reads a norm of their weighted sum. T tokens, E hidden size, S streams, N tokens whose logits are
wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.hyper_connections import HyperConnection, HyperSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import PRE, NormSpec
from headrace.back.layers.residual import Branch
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class HyperLayerSpec:
    """One layer, with a norm before each branch."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    streams: HyperSpec

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> HyperLayer:
        """See DecoderLayerSpec."""
        return HyperLayer(scope, cache, self, sizes, norms)


class HyperLayer:
    """See HyperLayerSpec; the residual of its stream is [T, S, E]."""

    tail: Tail | None = None

    def __init__(
        self, scope: Scope, cache: int, spec: HyperLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        width = sizes.width
        self._norms = [
            norms.build(scope / str(name), width, eps=sizes.eps)
            for name in (PRE.before_attention, PRE.before_mlp)
        ]
        self._around_attention, self._around_mlp = (
            HyperConnection(scope / name, spec.streams, width) for name in ("attn_hc", "ffn_hc")
        )
        self.mixer: Mixer[Any] = spec.mixer.build(scope, cache)
        self._mlp = spec.feed_forward.build(
            scope, FeedForwardPlace(width=width, inner=sizes.inner, activation=sizes.activation)
        )

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of its mixer."""
        return self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        x_TSE = stream[1]
        weights, x_TE = self._around_attention.collapse(x_TSE)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(self._norms[0].norm(x_TE), batch, at_N)
        if after is not None and at_N is not None:
            x_TSE, x_TE = x_TSE.index_select(0, at_N), x_TE.index_select(0, at_N)
            weights, batch = weights.at(at_N), after
        y_TE = _whole(self.mixer.attend_into(handed, x_TE, batch))
        x_TSE = self._around_attention.expand(weights, y_TE, x_TSE)
        weights, x_TE = self._around_mlp.collapse(x_TSE)
        y_TE = _whole(self._mlp.forward_into(self._norms[1].norm(x_TE), x_TE))
        return None, self._around_mlp.expand(weights, y_TE, x_TSE)


def _whole(branch_TE: Branch) -> torch.Tensor:
    """What a branch gives, summed over the ranks."""
    assert branch_TE is not None, "a branch that does not add gives its sum"
    return branch_TE.total() if isinstance(branch_TE, Partial) else branch_TE
