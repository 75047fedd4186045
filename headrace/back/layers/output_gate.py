"""The gate of what the heads of an attention give.

T tokens, X values of this rank's heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part, Shard, local_size


@dataclass(frozen=True, kw_only=True)
class OutputGate:
    """What heads give is multiplied by the sigmoid of a projection of the layer's input (Qiu et al.
    2025, "Gated attention for large language models"). `per_head`: one number a head, else one a
    value. `name`: the projection's module; None: the query's tensor holds it too, head by head its
    query and its gate. `act`: what takes the sigmoid's place, one of op gated_norm's. `bias`: the
    tensor of a number for each head that is added to its gates; None: there is none. `norm_eps`: of
    a root mean square norm without weight of what each head gives, before the gate, of which there
    is one for each value then; None: there is none. `scale`: what the projection's weight is
    multiplied with."""

    name: str | None = None
    per_head: bool = False
    act: str = "sigmoid"
    bias: str | None = None
    norm_eps: float | None = None
    scale: float = 1.0

    def part(self, heads: int, values: int) -> Part:
        """The projection, in global sizes."""
        size = heads * (1 if self.per_head else values)
        return Part(self.name or "gate", size, heads, scale=self.scale)

    def build(self, scope: Scope, heads: int, values: int) -> HeadsGate:
        """Of so many heads, of which a rank holds its share."""
        return HeadsGate(scope, self, heads, values)


class HeadsGate:
    """`gated(y_TX, gate_TX)` gives y_TX; see OutputGate."""

    def __init__(self, scope: Scope, spec: OutputGate, heads: int, values: int) -> None:
        self.gated: GatedNorm = not_loaded
        part = Part(spec.bias or "gate", heads, heads)
        spread = values if spec.per_head else 1
        self._problem = GatedNormProblem(
            device=scope.kind,
            dtype=scope.dtype,
            width=local_size(part, scope.mesh.tp) * values,
            group=0 if spec.norm_eps is None else values,
            eps=spec.norm_eps or 0.0,
            norm_first=spec.norm_eps is not None,
            gate=spec.act,
            spread=spread,
        )
        self._repeats = values // spread
        self._scope = scope
        self._bias = None
        if spec.bias is not None:
            shard = Shard(axis="tp", dim=0, parts=(part,))
            self._bias = scope.param(spec.bias, (heads,), shard=shard, init="zeros")
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_X = None
        if self._problem.group:
            weight_X = torch.ones(self._problem.width, device=self._scope.device)
        gated = self.gated = self._scope.bind(GATED_NORM, self._problem, weight_X)
        if self._bias is None:
            return
        bias_X = self._bias.take().repeat_interleave(self._repeats)

        def biased(y_TX: torch.Tensor, gate_TX: torch.Tensor) -> torch.Tensor:
            return gated(y_TX, gate_TX + bias_X)

        self.gated = biased
