"""A gated MLP beside a mixture that is not one of its experts: it has a width or a bound of its
own. It is computed as the one expert that every token takes, and the two are summed.

T tokens, E hidden size, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.experts.op import OP as EXPERTS
from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.shard import Part, Shard, local_size


@dataclass(frozen=True, kw_only=True)
class LoneExpert:
    """The MLP. `activation` and `clamp`: see op experts; `name`: its module in the layer."""

    inner: int
    name: str
    activation: str = "silu"
    clamp: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BesideSpec:
    """A mixture and an MLP beside it, as a layer's feed-forward. The mixture has no shared
    experts."""

    mixture: MixtureSpec
    shared: LoneExpert

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        return Beside(scope, self, place)


class Beside:
    """x_TE -> y_TE: see BesideSpec."""

    norms = False

    def __init__(self, scope: Scope, spec: BesideSpec, place: FeedForwardPlace) -> None:
        self._mixture = spec.mixture.build(scope, place)
        self._spec, self._width = spec.shared, place.width
        self._scope = scope / spec.shared.name
        inner = spec.shared.inner
        self._part = Part("expert's inner values", inner, inner)
        rows, columns = (Shard(axis="tp", dim=dim, parts=(self._part,)) for dim in (0, 1))
        at, shape = self._scope, (inner, place.width)
        self._gate = at.param("gate_proj.weight", shape, shard=rows)
        self._up = at.param("up_proj.weight", shape, shard=rows)
        self._down = at.param("down_proj.weight", (place.width, inner), shard=columns)
        self._lone = not_loaded
        scope.on_finish(self._finish)

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | Partial:
        """y_TE, to be added to the residual."""
        expert_T1 = torch.zeros((x_TE.shape[0], 1), dtype=torch.int32, device=x_TE.device)
        weight_T1 = torch.ones((x_TE.shape[0], 1), device=x_TE.device)
        y_TE = self._lone(x_TE, expert_T1, weight_T1)
        routed = self._mixture.forward_into(x_TE, residual_TE)
        assert routed is not None, "a mixture leaves its sum to whoever adds it"
        axis = self._scope.mesh.tp
        if isinstance(routed, Partial):
            return Partial(routed.share + y_TE, axis)
        return routed + (y_TE if axis.size == 1 else Partial(y_TE, axis).total())

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        problem = ExpertsProblem(
            device=scope.kind,
            dtype=scope.dtype,
            experts=1,
            slots=1,
            width=self._width,
            inner=local_size(self._part, scope.mesh.tp),
            activation=spec.activation,
            clamp=spec.clamp,
        )
        up_IE = torch.cat((self._gate.take(), self._up.take()))
        self._lone = scope.bind(EXPERTS, problem, up_IE[None], self._down.take()[None])
