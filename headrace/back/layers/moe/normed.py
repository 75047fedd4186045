"""A dense MLP and a mixture of experts that read one residual, each with norms of its own (Gemma
4).

T tokens, E hidden size, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.rms_norm.op import OP as RMS_NORM
from headrace.back.kernels.rms_norm.op import Norm, RMSNormProblem
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial


@dataclass(frozen=True, kw_only=True)
class NormedMixtureSpec:
    """`dense` reads what the layer's norm gives, the mixture and its router the residual through
    norms of their own; the two normed results are added. The mixture lies in the layer itself."""

    mixture: MixtureSpec
    dense: FeedForwardSpec
    eps: float

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        return NormedMixture(scope, self, place)


class NormedMixture:
    """x_TE -> y_TE: see NormedMixtureSpec."""

    def __init__(self, scope: Scope, spec: NormedMixtureSpec, place: FeedForwardPlace) -> None:
        self._dense = spec.dense.build(scope, replace(place, adds=False))
        self._mixture = Mixture(scope, spec.mixture, place.width, activation=place.activation)
        self._axis = scope.mesh.tp
        self._after_dense, self._before, self._after = (
            RMS.build(scope / name, place.width, eps=spec.eps)
            for name in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        )
        self._router_norm = RouterNorm(scope / "router", place.width, eps=spec.eps)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._dense.norms

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """y_TE, to be added to the residual."""
        dense_TE = self._dense.forward_into(x_TE, residual_TE)
        assert isinstance(dense_TE, torch.Tensor), "the dense MLP adds to the residual"
        routed_TE = self._mixture.mixed(
            self._before.norm(residual_TE), self._router_norm.norm(residual_TE)
        )
        if self._axis.size > 1:
            routed_TE = Partial(routed_TE, self._axis).total()
        return self._after_dense.norm(dense_TE) + self._after.norm(routed_TE)


class RouterNorm:
    """`norm(x_TE)`: the root mean square norm, times a learned scale and 1/sqrt(E)."""

    def __init__(self, scope: Scope, width: int, *, eps: float) -> None:
        self.norm: Norm = not_loaded
        self._scope = scope
        self._scale = scope.param("scale", (width,), init="ones")
        self._problem = RMSNormProblem(device=scope.kind, dtype=scope.dtype, width=width, eps=eps)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_E = self._scale.take().float() * self._problem.width**-0.5
        self.norm = self._scope.bind(RMS_NORM, self._problem, weight_E)
