"""Activation of an MLP without a gate: y = act(x), element by element.

`bind(problem)` returns `f(x_TI) -> y_TI`. `activation`: "silu", "gelu" (erf), "gelu_tanh", "relu",
"relu2" (relu squared, So et al. 2021, "Primer"), "quick_gelu" (x * sigmoid(1.702 x), Hendrycks and
Gimpel 2016), "tanh", "sigmoid". It is float32, the result is cast once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.gated_act import op as gated_act
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    **gated_act.ACTIVATIONS,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, kw_only=True)
class ActivationProblem:
    """The same for every width."""

    device: str
    dtype: torch.dtype
    activation: str


def bind_reference(problem: ActivationProblem) -> Activation:
    """The reference."""

    def activation(x_TI: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[problem.activation](x_TI.float()).to(x_TI.dtype)

    return activation


def _sample(problem: ActivationProblem) -> Sample:
    values = random_tensor(
        3, 200, dtype=problem.dtype, device=problem.device, generator=sample_generator()
    )
    return Sample(problem=problem, weights=(), arguments=(4 * values,))


OP: Op[ActivationProblem] = Op(
    name="activation",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.activation.native:KERNEL",
        "headrace.back.kernels.activation.triton_activation:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
