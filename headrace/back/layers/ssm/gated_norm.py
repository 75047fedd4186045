"""The gate that a recurrent layer's output passes, with the norm beside it (op gated_norm).

T tokens, W this rank's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.gated_norm.op import OP, GatedNormProblem
from headrace.back.kernels.gated_norm.op import GatedNorm as Apply
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import all_reduce
from headrace.back.parallel.param import Param
from headrace.back.parallel.shard import Part, Shard, local_size
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GatedNormSpec:
    """groups      norms side by side in the whole width; 0: there is no norm, only the gate
    norm_first  the gate comes behind the norm
    gate        "silu", "sigmoid" or "": as it is
    shared      the checkpoint has one weight for all groups
    name        the module in the mixer
    """

    eps: float = 0.0
    groups: int = 1
    norm_first: bool = False
    gate: str = "silu"
    shared: bool = False
    name: str = "norm"


ONLY_GATE = GatedNormSpec(groups=0)


class GatedNorm:
    """`apply(x_TW, gate_TW)` -> y_TW: see GatedNormSpec. `part`: the width and how the ranks share
    it. A norm over a width that the ranks share sums its squares over them."""

    def __init__(self, scope: Scope, part: Part, spec: GatedNormSpec) -> None:
        self.apply: Apply = not_loaded
        self._scope, self._spec = scope, spec
        self._width = local_size(part, scope.mesh.tp)
        self._group = part.size // spec.groups if spec.groups else 0
        self._weight = self._param(part) if spec.groups else None
        scope.on_finish(self._finish)

    def _param(self, part: Part) -> Param:
        """The weight; ConfigError if the ranks cut a group of several."""
        scope, spec, axis = self._scope / self._spec.name, self._spec, self._scope.mesh.tp
        if self._width % self._group and spec.groups > 1:
            raise ConfigError(
                f"{axis.option} {axis.size} does not fit the model: it cuts the {spec.groups} groups "
                f"of {self._group} of {scope.path} into {self._width}",
                field=axis.option,
            )
        if spec.shared:
            return scope.param("weight", (self._group,), init="ones")
        shard = Shard(axis="tp", dim=0, parts=(part,))
        return scope.param("weight", (part.size,), shard=shard, init="ones")

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        weight_W = None if self._weight is None else self._weight.take().float()
        if weight_W is not None and spec.shared:
            weight_W = weight_W.repeat(self._width // self._group)
        if weight_W is not None and self._width % self._group:
            self.apply = self._summed(weight_W)
            return
        problem = GatedNormProblem(
            device=scope.kind,
            dtype=scope.dtype,
            width=self._width,
            group=self._group,
            eps=spec.eps,
            norm_first=spec.norm_first,
            gate=spec.gate,
        )
        self.apply = scope.bind(OP, problem, weight_W)

    def _summed(self, weight_W: torch.Tensor) -> Apply:
        spec, axis, size = self._spec, self._scope.mesh.tp, self._group
        gate_alone = GatedNormProblem(
            device=self._scope.kind,
            dtype=torch.float32,
            width=self._width,
            group=0,
            gate=spec.gate,
        )
        gated = self._scope.bind(OP, gate_alone, None)

        def apply(x_TW: torch.Tensor, gate_TW: torch.Tensor) -> torch.Tensor:
            wide_TW, gate_TW = x_TW.float(), gate_TW.float()
            wide_TW = wide_TW if spec.norm_first else gated(wide_TW, gate_TW)
            squares_T1 = all_reduce(wide_TW.square().sum(-1, keepdim=True), axis)
            y_TW = wide_TW * torch.rsqrt(squares_T1 / size + spec.eps) * weight_W
            return (gated(y_TW, gate_TW) if spec.norm_first else y_TW).to(x_TW.dtype)

        return apply
