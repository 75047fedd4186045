"""A GEMM of its own for each head: y_THO[t, h] = W_HOI[h] x_THI[t, h].

`bind(problem, weight_HOI)` returns `f(x_THI, y_THO) -> None`. Both may be strided views whose last
dimension is contiguous (a part of a wider vector). It applies a head's key and value weights around
attention over latents. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

HeadLinear = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class HeadLinearProblem:
    """`heads` H of `inputs` I and `outputs` O; `dtype` is that of x, W and y."""

    device: str
    dtype: torch.dtype
    heads: int
    inputs: int
    outputs: int


def check_operands(problem: HeadLinearProblem, x_THI: torch.Tensor, y_THO: torch.Tensor) -> None:
    """Asserts shapes, dtypes and contiguous last dimensions."""
    assert x_THI.shape == (y_THO.shape[0], problem.heads, problem.inputs), x_THI.shape
    assert y_THO.shape[1:] == (problem.heads, problem.outputs), y_THO.shape
    assert x_THI.dtype == y_THO.dtype == problem.dtype, (x_THI.dtype, y_THO.dtype)
    assert x_THI.stride(2) == y_THO.stride(2) == 1, (x_THI.stride(), y_THO.stride())


def bind_reference(problem: HeadLinearProblem, weight_HOI: torch.Tensor) -> HeadLinear:
    """The reference: one batched product."""
    weight_HIO = weight_HOI.transpose(1, 2)

    def head_linear(x_THI: torch.Tensor, y_THO: torch.Tensor) -> None:
        check_operands(problem, x_THI, y_THO)
        y_THO.copy_(torch.bmm(x_THI.transpose(0, 1), weight_HIO).transpose(0, 1))

    return head_linear


def _sample(problem: HeadLinearProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_tensor(problem.heads, problem.outputs, problem.inputs, **new)
    x = random_tensor(37, problem.heads, problem.inputs + 16, **new)[..., : problem.inputs]
    y = torch.zeros(
        (37, problem.heads, problem.outputs + 8), dtype=problem.dtype, device=problem.device
    )[..., : problem.outputs]
    return Sample(
        problem=problem, weights=(weight,), arguments=(x, y), further=((x[:3], y[:3].clone()),)
    )


OP: Op[HeadLinearProblem] = Op(
    name="head_linear",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.head_linear.native:KERNEL",
        "headrace.back.kernels.head_linear.triton_head_linear:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
