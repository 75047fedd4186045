"""Gated activation of an MLP: y = act(gate) * up (Shazeer 2020, "GLU variants").

`bind(problem)` returns `f(gate_up_T2I) -> y_TI`; columns [0, I) are the gate, [I, 2I) the up
projection. `activation`: "silu", "gelu" (erf), "gelu_tanh", "relu", "relu2" (relu squared, So et
al. 2021, "Primer"). The activation and the product are float32, the result is cast once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

GatedAct = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GatedActProblem:
    """`width` is I, the columns of the result."""

    device: str
    dtype: torch.dtype
    width: int
    activation: str


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: x.relu().square(),
}


def gated(gate_up_T2I: torch.Tensor, activation: str) -> torch.Tensor:
    """The definition, in float32."""
    gate, up = gate_up_T2I.float().chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def bind_reference(problem: GatedActProblem) -> GatedAct:
    """The reference."""

    def gated_act(gate_up_T2I: torch.Tensor) -> torch.Tensor:
        return gated(gate_up_T2I, problem.activation).to(gate_up_T2I.dtype)

    return gated_act


def _sample(problem: GatedActProblem) -> Sample:
    values = random_tensor(
        3,
        2 * problem.width,
        dtype=problem.dtype,
        device=problem.device,
        generator=sample_generator(),
    )
    return Sample(problem=problem, weights=(), arguments=(4 * values,))


OP: Op[GatedActProblem] = Op(
    name="gated_act",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.gated_act.native:KERNEL",
        "headrace.back.kernels.gated_act.triton_gated_act:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
