"""Alternating updates (Baykal et al. 2023): a decoder keeps several streams, of which each layer
computes one, the active one. Linear maps of a few numbers for each token predict all streams from
all before the layer, and correct them behind it. Beside the attention stands a learned residual of
low rank (Menghani et al. 2024, "LAuReL").

The maps are computed in float32: they are of as many numbers as there are streams. T tokens, E
hidden size, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.layer_tail import InputGate
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope

LEAST_SQUARE = 1e-5
"""A projected stream's mean square counts as at least this when it is scaled."""


class AlternatingUpdates:
    """The maps of one layer; `scope` is theirs."""

    def __init__(
        self, scope: Scope, width: int, *, streams: int, active: int, norms: NormSpec, eps: float
    ) -> None:
        self._norm = norms.build(scope / "router_norm", width, eps=eps)
        names = ("modality_router", "prediction_coefs", "correction_coefs")
        shapes = ((streams, width), (streams**2, streams), (streams, streams))
        self._params = [
            scope.param(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)
        ]
        self._weights: list[torch.Tensor] = []
        self._streams, self._active, self._scale = streams, active, 1.0 / width
        scope.on_finish(self._finish)

    def predict(self, x_STE: torch.Tensor) -> torch.Tensor:
        """Each stream, and what the map of the active one makes of all of them."""
        map_TZ = F.linear(self._routed(x_STE[self._active]), self._weights[1])
        map_TSS = map_TZ.unflatten(1, (self._streams, self._streams))
        more_TSE = torch.bmm(map_TSS, x_STE.transpose(0, 1).float())
        return x_STE + more_TSE.transpose(0, 1).to(x_STE.dtype)

    def correct(self, predicted_STE: torch.Tensor, y_TE: torch.Tensor) -> torch.Tensor:
        """The predictions, each moved by its share of what the layer has found the active one to
        lack."""
        share_TS = F.linear(self._routed(y_TE), self._weights[2]) + 1.0
        lacking_TE = y_TE - predicted_STE[self._active]
        return predicted_STE + lacking_TE * share_TS.t()[:, :, None].to(y_TE.dtype)

    def _routed(self, x_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm.norm(x_TE).float() * self._scale, self._weights[0]).tanh()

    def _finish(self) -> None:
        self._weights = [param.take().float() for param in self._params]


class LearnedResidual:
    """x_TE -> x plus a normed projection of it through `rank` numbers."""

    def __init__(self, scope: Scope, width: int, rank: int, *, norms: NormSpec, eps: float) -> None:
        self._left = WholeLinear(scope / "linear_left", width, rank)
        self._right = WholeLinear(scope / "linear_right", rank, width)
        self._norm = norms.build(scope / "post_laurel_norm", width, eps=eps)

    def of(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return x_TE + self._norm.norm(self._right.project(self._left.project(x_TE)))


class AltUpTail:
    """x_STE -> x_STE, in place: a projection of the layer's own input, gated by the active stream,
    goes into all streams but the first. `scaled`: the gate reads that stream times a learned
    scale."""

    def __init__(
        self, scope: Scope, gate: InputGate, width: int, *, active: int, scaled: bool
    ) -> None:
        self._gate, self._active, self._scaled = gate, active, scaled
        self._scale = (scope / "altup").param("correct_output_scale", (width,), init="ones")
        self._scale_E = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, x_STE: torch.Tensor, input_TP: torch.Tensor | None) -> torch.Tensor:
        """See the class."""
        assert input_TP is not None, "the layer has an input of its own"
        active_TE = x_STE[self._active]
        if self._scaled:
            active_TE = active_TE * self._scale_E
        x_STE[1:] += self._gate.branch(active_TE, input_TP)
        return x_STE

    def _finish(self) -> None:
        self._scale_E = self._scale.take()


@dataclass(frozen=True, kw_only=True)
class AltUpStreamsSpec:
    """`count`: S."""

    count: int

    def build(self, scope: Scope, width: int) -> AltUpStreams:
        """See ResidualStreamsSpec."""
        return AltUpStreams(scope, self.count, width)


class AltUpStreams:
    """How the streams begin and end: each but the first is a projection, as long as the first."""

    def __init__(self, scope: Scope, count: int, width: int) -> None:
        self._parting, self._joining = (
            [WholeLinear(scope / name / str(i), width, width) for i in range(count - 1)]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """x_STE of embeddings."""
        others = (_as_long(linear.project(x_TE), x_TE) for linear in self._parting)
        return torch.stack([x_TE, *others])

    def end(self, x_STE: torch.Tensor) -> torch.Tensor:
        """x_TE: their mean."""
        first_TE, *others = x_STE.unbind()
        pairs = zip(self._joining, others, strict=True)
        projected = (_as_long(linear.project(x_TE), first_TE) for linear, x_TE in pairs)
        return torch.stack([first_TE, *projected]).mean(0)


def _as_long(x_TE: torch.Tensor, model_TE: torch.Tensor) -> torch.Tensor:
    """x with the length of `model_TE`."""
    have_T1, wanted_T1 = (one.float().square().mean(-1, keepdim=True) for one in (x_TE, model_TE))
    return x_TE * (wanted_T1.sqrt() / have_T1.clamp(min=LEAST_SQUARE).sqrt()).to(x_TE.dtype)
