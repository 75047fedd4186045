"""A decoder layer whose branches are normed and join a residual that fades
(layers/gated_residual.py). T tokens, E hidden size, N tokens whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.gated_residual import ResidualGate, ScaledBeforeSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import Branch, add_norm, total
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import RMS_NO_WEIGHT, SANDWICH, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream, handed_on

GATES = ("post_attention_residual_gate", "post_feedforward_residual_gate")


@dataclass(frozen=True, kw_only=True)
class GatedResidualLayerSpec:
    """One layer. `post_eps`: of the norms behind its branches; `temperature`: of its gates."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    post_eps: float
    temperature: float

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec
    ) -> GatedResidualLayer:
        """See DecoderLayerSpec."""
        return GatedResidualLayer(scope, cache, self, sizes, norms)


class GatedResidualLayer:
    """See GatedResidualLayerSpec and Layer."""

    takes_adapters = True
    tail: Tail | None = None

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: GatedResidualLayerSpec,
        sizes: DecoderSizes,
        norms: NormSpec,
    ) -> None:
        names, width = SANDWICH, sizes.width
        self._before = norms.build(scope / str(names.before_attention), width, eps=sizes.eps)
        self.mixer: Mixer[Any] = spec.mixer.build(scope, cache)
        after = scope / str(names.after_attention)
        self._after = RMS_NO_WEIGHT.build(after, width, eps=spec.post_eps)
        self._before_mlp = norms.build(scope / str(names.before_mlp), width, eps=sizes.eps)
        place = FeedForwardPlace(width=width, inner=sizes.inner, activation=sizes.activation)
        self._mlp = spec.feed_forward.build(scope, place)
        self._after_mlp = ScaledBeforeSpec().build(
            scope / str(names.after_mlp), width, eps=spec.post_eps
        )
        self._gates = tuple(
            ResidualGate(scope / name, width, temperature=spec.temperature) for name in GATES
        )
        self._adapters = scope.adapters

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of its mixer."""
        return self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        residual_TE = add_norm(None, *stream)
        handed, residual_TE, batch = handed_on(
            self.mixer,
            self._before.norm(residual_TE),
            residual_TE,
            batch,
            self._adapters,
            last=last,
        )
        y_TE = _whole(self.mixer.attend_into(handed, residual_TE, batch))
        residual_TE = self._gates[0].join(residual_TE, self._after.norm(y_TE))
        y_TE = _whole(self._mlp.forward_into(self._before_mlp.norm(residual_TE), residual_TE))
        return None, self._gates[1].join(residual_TE, self._after_mlp.norm(y_TE))


def _whole(branch_TE: Branch) -> torch.Tensor:
    branch_TE = total(branch_TE)
    assert branch_TE is not None, "a branch that does not add gives its sum"
    return branch_TE
