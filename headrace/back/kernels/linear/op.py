"""y = x W^T + b. Shapes: T tokens, I inputs, O outputs.

`bind(problem, weight_OI, bias_O | None)` returns `f(x_TI) -> y_TO`. A kernel may repack the weight;
the layer then drops its own, so that it is held once. `shared` says that somebody else keeps
reading the plain weight (tied embeddings): kernels that hold a second copy refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """`device` is a torch device type ("cpu", "cuda"). `wide`: y is float32 whatever the dtype of x
    (logits)."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool = False
    shared: bool = False
    wide: bool = False


def bind_reference(
    problem: LinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> Linear:
    """torch's own linear on the plain weight."""

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, weight_OI, bias_O)

    def wide(x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, weight_OI, bias_O).float()

    return wide if problem.wide else linear


def _sample(problem: LinearProblem) -> Sample:
    problem = replace(problem, outputs=checked_size(problem.outputs))
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_tensor(problem.outputs, problem.inputs, **new) / problem.inputs**0.5
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    return Sample(
        problem=problem,
        weights=(weight, bias),
        arguments=(random_tensor(3, problem.inputs, **new),),
        further=tuple((random_tensor(rows, problem.inputs, **new),) for rows in FURTHER_ROWS),
    )


def checked_size(size: int) -> int:
    """A slice of the outputs: at most 512, with the same remainder by every power of two up to
    256."""
    return size if size <= 512 else 256 + size % 256


FURTHER_ROWS = (1, 40)
"""Rows of a check beside the usual few: kernels go other ways for one row and for many."""
REFERENCE = Kernel(name="torch", supports=lambda problem: None, bind=bind_reference)

OP: Op[LinearProblem] = Op(
    name="linear",
    reference=REFERENCE,
    kernels=(
        "headrace.back.kernels.linear.native:KERNEL",
        "headrace.back.kernels.linear.mkldnn:KERNEL",
        "headrace.back.kernels.linear.triton_linear:KERNEL",
        "headrace.back.kernels.linear.triton_fixed:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
