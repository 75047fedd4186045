"""A decoder layer of several streams (layers/altup.py): it computes the active one, with a learned
residual beside the attention. T tokens, E hidden size, S streams, N tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.altup import AlternatingUpdates, AltUpTail, LearnedResidual
from headrace.back.layers.layer_tail import InputGate
from headrace.back.layers.linear import Branch
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import SANDWICH, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream


@dataclass(frozen=True, kw_only=True)
class AltUpLayerSpec:
    """One layer, with a norm before and behind each branch. `streams`: S; `active`: the stream that
    it computes; `rank`: of the learned residual; `input_width`: of the layer's own input;
    `scaled`: see AltUpTail."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    streams: int
    active: int
    rank: int
    input_width: int
    scaled: bool

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> AltUpLayer:
        """See DecoderLayerSpec."""
        return AltUpLayer(scope, cache, self, sizes, norms)


class AltUpLayer:
    """See AltUpLayerSpec; the residual of its stream is [S, T, E]."""

    takes_adapters = False

    def __init__(
        self, scope: Scope, cache: int, spec: AltUpLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        normed: dict[str, Any] = {"norms": norms, "eps": sizes.eps}
        place, width = SANDWICH, sizes.width
        names = place.before_attention, place.after_attention, place.before_mlp, place.after_mlp
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            norms.build(scope / str(name), width, eps=sizes.eps) for name in names
        )
        self.mixer: Mixer[Any] = spec.mixer.build(scope, cache)
        self._mlp = spec.feed_forward.build(
            scope, FeedForwardPlace(width=width, inner=sizes.inner, activation=sizes.activation)
        )
        self._residual = LearnedResidual(scope / "laurel", width, spec.rank, **normed)
        self._altup = AlternatingUpdates(
            scope / "altup", width, streams=spec.streams, active=spec.active, **normed
        )
        gate = InputGate(scope, width, spec.input_width, activation=sizes.activation, **normed)
        self.tail = AltUpTail(scope, gate, width, active=spec.active, scaled=spec.scaled)
        self._active = spec.active

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of its mixer."""
        return self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        predicted_STE = self._altup.predict(stream[1])
        x_TE = self._before_attention.norm(predicted_STE[self._active])
        learned_TE = self._residual.of(x_TE)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(x_TE, batch, at_N)
        if after is not None and at_N is not None:
            predicted_STE = predicted_STE.index_select(1, at_N)
            learned_TE, batch = learned_TE.index_select(0, at_N), after
        active_TE = predicted_STE[self._active]
        attended_TE = _whole(self.mixer.attend_into(handed, active_TE, batch))
        y_TE = (active_TE + self._after_attention.norm(attended_TE) + learned_TE) * 2**-0.5
        inner_TE = _whole(self._mlp.forward_into(self._before_mlp.norm(y_TE), y_TE))
        y_TE += self._after_mlp.norm(inner_TE)
        return None, self._altup.correct(predicted_STE, y_TE)


def _whole(branch_TE: Branch) -> torch.Tensor:
    assert isinstance(branch_TE, torch.Tensor), "a branch that does not add gives its sum"
    return branch_TE
