"""A decoder layer beside whose residual there are states kept before layers below
(layers/kept_states.py, layers/gated_mixture.py). T tokens, E hidden size, S 1 + slots."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.kept_states import StateChange, StateChangeSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import add_norm
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderLayer, DecoderSizes, LayerSpec, Stream


@dataclass(frozen=True, kw_only=True)
class SkippingLayerSpec:
    """One layer, and what happens before it."""

    layer: LayerSpec
    before: StateChangeSpec

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec
    ) -> SkippingLayer:
        """See DecoderLayerSpec."""
        before = self.before.build(scope, sizes.width)
        return SkippingLayer(self.layer.build(scope, cache, sizes, norms), before)


class SkippingLayer:
    """See SkippingLayerSpec; the residual of its stream is [S, T, E], behind the last layer that
    writes a cache [1, N, E]."""

    takes_adapters = True
    tail: Tail | None = None

    def __init__(self, layer: DecoderLayer, before: StateChange | None) -> None:
        self.mixer = layer.mixer
        self._layer, self._before = layer, before

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of its mixer."""
        return self._layer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, states_STE = stream
        if self._before is not None:
            add_norm(None, branch_TE, states_STE[0])
            branch_TE = None
            self._before.apply(states_STE)
        branch_TE, residual_TE = self._layer.forward((branch_TE, states_STE[0]), batch, last=last)
        if not last:
            return branch_TE, states_STE
        return None, add_norm(None, branch_TE, residual_TE)[None]
