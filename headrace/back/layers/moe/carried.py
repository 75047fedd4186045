"""A mixture of experts whose router is an MLP of its own that also reads what the router of the
layer before had in mind (ZAYA; transformers 5.23, modeling_zaya).

T tokens, E hidden size, R the router's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class CarriedMixtureSpec:
    """`mixture`: its router is the last layer of the MLP; `size`: R."""

    mixture: MixtureSpec
    size: int
    eps: float

    def build(self, scope: Scope, place: FeedForwardPlace, *, first: bool) -> CarriedMixture:
        """`scope` is the layer's; `first`: there is no layer before."""
        return CarriedMixture(scope / self.mixture.name, self, place, first=first)


class CarriedMixture:
    """(x_TE, state_TR) -> (y_TE, state_TR): see CarriedMixtureSpec."""

    def __init__(
        self, scope: Scope, spec: CarriedMixtureSpec, place: FeedForwardPlace, *, first: bool
    ) -> None:
        gate, size = scope / "gate", spec.size
        self._down = WholeLinear(gate / "down_proj", place.width, size, bias=True)
        self._carried = None if first else gate.param("router_states_scale", (size,), init="ones")
        inner = gate / "router_mlp"
        self._norm = RMS.build(inner / "norm", size, eps=spec.eps)
        self._linears = [
            WholeLinear(inner / name, size, size, bias=True) for name in ("fc1", "fc2")
        ]
        self._activation = ElementwiseActivation(inner, "gelu")
        self._mixture = Mixture(
            scope, spec.mixture, place.width, activation=place.activation, routed_width=size
        )
        self._axis, self._scale_R = scope.mesh.tp, torch.empty(0)
        scope.on_finish(self._finish)

    def forward(
        self, x_TE: torch.Tensor, state_TR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class. States may be wider than x's dtype."""
        mind_TR = self._down.project(x_TE)
        if self._carried is not None:
            mind_TR = mind_TR + state_TR.to(x_TE.dtype) * self._scale_R
        routed_TR = self._norm.norm(mind_TR)
        for linear in self._linears:
            routed_TR = self._activation.apply(linear.project(routed_TR))
        y_TE = self._mixture.mixed(x_TE, routed_TR)
        return y_TE if self._axis.size == 1 else Partial(y_TE, self._axis).total(), mind_TR

    def _finish(self) -> None:
        if self._carried is not None:
            self._scale_R = self._carried.take()
