"""A gated MLP that is computed as the one expert that every token takes: of experts' activations,
which dense MLPs do not have, and with their bounds.

T tokens, E hidden size, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.experts.op import OP as EXPERTS
from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.layers.mlp import FeedForwardPlace
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.parallel.shard import Part, Shard, local_size


@dataclass(frozen=True, kw_only=True)
class LoneExpert:
    """The MLP as data of its layer. `activation` and `clamp`: see op experts; `name`: its module in
    the layer; `merged`: the tensor that holds gate and up, if they are one, `paired`: its rows take
    turns. `bias`: of both, where they are one tensor."""

    inner: int
    name: str
    activation: str = "silu"
    clamp: float = 0.0
    merged: str | None = None
    paired: bool = False
    bias: bool = False

    def build(self, scope: Scope, place: FeedForwardPlace) -> LoneMLP:
        """See FeedForwardSpec."""
        return LoneMLP(scope, self, place)


class LoneMLP:
    """x_TE -> y_TE: see LoneExpert."""

    norms = False

    def __init__(self, scope: Scope, spec: LoneExpert, place: FeedForwardPlace) -> None:
        self._spec, self._width, self._adds = spec, place.width, place.adds
        self._scope = scope / spec.name
        inner, at = spec.inner, self._scope
        self._part = Part("expert's inner values", inner, inner)
        pairs = Part("expert's inner pairs", 2 * inner, inner)
        parts = (pairs,) if spec.paired else (self._part, self._part)
        rows = Shard(axis="tp", dim=0, parts=parts)
        columns = Shard(axis="tp", dim=1, parts=(self._part,))
        shape, names = (2 * inner, place.width), ("gate_proj", "up_proj")
        pieces = tuple(
            WeightPiece(
                name=at.name(f"{name}.weight"), shape=(inner, place.width), offset=i * inner
            )
            for i, name in enumerate(names)
        )
        if spec.merged is not None:
            pieces = (WeightPiece(name=at.name(f"{spec.merged}.weight"), shape=shape),)
        self._up = at.param("gate_up.weight", shape, pieces=pieces, shard=rows)
        self._down = at.param("down_proj.weight", (place.width, inner), shard=columns)
        self._biases: tuple[Param, ...] = ()
        if spec.bias:
            assert spec.merged is not None, spec
            self._biases = (
                at.param(f"{spec.merged}.bias", (2 * inner,), shard=rows, init="zeros"),
                at.param("down_proj.bias", (place.width,), init="zeros"),
            )
        self._lone = not_loaded
        scope.on_finish(self._finish)

    def share(self, x_TE: torch.Tensor) -> torch.Tensor:
        """This rank's share of y_TE."""
        expert_T1 = torch.zeros((x_TE.shape[0], 1), dtype=torch.int32, device=x_TE.device)
        weight_T1 = torch.ones((x_TE.shape[0], 1), device=x_TE.device)
        y_TE: torch.Tensor = self._lone(x_TE, expert_T1, weight_T1)
        return y_TE

    def forward_into(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | Partial:
        """y_TE, to be added to the residual."""
        share_TE, axis = self.share(x_TE), self._scope.mesh.tp
        if axis.size == 1:
            return share_TE
        share = Partial(share_TE, axis)
        return share if self._adds else share.total()

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
            bias=spec.bias,
        )
        biases = [param.take()[None] for param in self._biases]
        up_XIE = self._up.take()[None]
        if spec.paired:
            up_XIE, *biases[:1] = (_apart(paired) for paired in (up_XIE, *biases[:1]))
        if biases and scope.mesh.tp.rank:
            biases[1] = torch.zeros_like(biases[1])  # the first rank adds it
        self._lone = scope.bind(EXPERTS, problem, up_XIE, self._down.take()[None], *biases)


def _apart(paired: torch.Tensor) -> torch.Tensor:
    """[1, 2I, ...]: rows that take turns, one kind behind the other."""
    return torch.cat((paired[:, 0::2], paired[:, 1::2]), dim=1)
