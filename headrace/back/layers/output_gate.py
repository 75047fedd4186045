"""The gate of what the heads of an attention give."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part


@dataclass(frozen=True, kw_only=True)
class OutputGate:
    """What heads give is multiplied by the sigmoid of a projection of the layer's input (Qiu et al.
    2025, "Gated attention for large language models"). `per_head`: one number a head, else one a
    value. `name`: the projection's module; None: the query's tensor holds it too, head by head its
    query and its gate. `act`: what takes the sigmoid's place, one of op gated_norm's."""

    name: str | None = None
    per_head: bool = False
    act: str = "sigmoid"

    def part(self, heads: int, values: int) -> Part:
        """The projection, in global sizes."""
        return Part(self.name or "gate", heads * (1 if self.per_head else values), heads)

    def bind(self, scope: Scope, heads: int, values: int) -> GatedNorm:
        """(y_TX, gate_TX) -> y_TX."""
        problem = GatedNormProblem(
            device=scope.kind,
            dtype=scope.dtype,
            width=heads * values,
            group=0,
            gate=self.act,
            spread=values if self.per_head else 1,
        )
        return scope.bind(GATED_NORM, problem, None)
