"""A linear layer with a weight of 4-bit numbers, with what a decoder layer puts around it: y =
act(norm(x) W^T + b), or added into the residual. For GPUs; CPUs read such weights in panels
(linear_blocks).

`bind(problem, weight, bias_O | None, norm_weight_I | None)` as of kernels/fused_linear/around.py.

The weight's numbers are rounded to the dtype of x once, and multiplied in float32: the same however
many tokens there are and wherever they are multiplied. But with `int8_rows` INT8_FROM tokens and
more become int8, a scale for each, and products of a group's integers are summed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.fused_linear.around import (
    LayerGemm,
    QuantizedLayerProblem,
    bind_around,
    gpu_refusal,
    some_outputs,
)
from headrace.back.kernels.fused_linear.around import sample_of as layer_sample
from headrace.back.kernels.linear.scaled_rows import scaled_rows
from headrace.back.kernels.linear_int4.layout import ROWS, Int4Weight, dequantize, empty, write
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance, random_tensor

CHECKED_ROWS = (1, 5, 20, 40, 100)
INT8_FROM = 257
"""Tokens of a step; fewer stream the weight."""


@dataclass(frozen=True, kw_only=True)
class LinearInt4Problem(QuantizedLayerProblem):
    """The layer; `dtype` is that of scales too. `minima`: each scale has one. `floats`: numbers are
    e2m1, or others of `levels`, not integers. `ordered`: inputs lie in another order than in x.
    `int8_rows`: many tokens become int8."""

    group: int | None = 128
    minima: bool = False
    floats: bool = False
    ordered: bool = False
    int8_rows: bool = False
    levels: str = "e2m1"


def int4_refusal(dtype: torch.dtype) -> str | None:
    """Why no kernel of ours can serve on this machine's GPU, whatever the weight's size, if so."""
    return gpu_refusal(OP, LinearInt4Problem, dtype)


def bind_reference(
    problem: LinearInt4Problem,
    weight: Int4Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> LayerGemm:
    """The definition, products in float32."""

    def gemm(x_TI: torch.Tensor) -> torch.Tensor:
        weight_OI = dequantize(weight, problem.dtype).float()
        if not problem.int8_rows or len(x_TI) < INT8_FROM:
            return x_TI.float() @ weight_OI.T
        rows = scaled_rows(x_TI, None, torch.int8)
        return rows.values_TI.float() @ weight_OI.T * rows.scales_TG

    return bind_around(problem, gemm, bias_O, norm_weight_I)


def random_weight(problem: LinearInt4Problem, generator: torch.Generator) -> Int4Weight:
    """Integers over their whole range; scales of about 1 / 8 of a usual weight."""
    outputs, inputs, group = problem.outputs, problem.inputs, problem.group
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    groups = 1 if group is None else -(-inputs // group)
    weight = empty(
        outputs, inputs, group, minima=problem.minima, dtype=problem.dtype, device=problem.device,
        floats=problem.floats,
    )  # fmt: skip
    step = ROWS * max(1, (1 << 24) // (ROWS * inputs))
    for first in range(0, outputs, step):
        rows = min(step, outputs - first)
        values = (random_tensor(rows, inputs, **new) * 4 + 8).round_().clamp_(0, 15)
        scales = random_tensor(rows, groups, **new).abs_().add_(0.5) / (4 * inputs**0.5)
        minima = None
        if problem.minima:
            minima = scales * (random_tensor(rows, groups, **new) + 7.5)
        if problem.floats:
            scales = torch.exp2(scales.log2().round())
        write(weight, first // ROWS, values, scales, minima)
    if problem.ordered:
        order_I = torch.randperm(inputs, generator=generator, device=generator.device)
        weight = replace(weight, order_I=order_I.to(weight.device, torch.int32))
    return replace(weight, int8_rows=problem.int8_rows, levels=problem.levels)


def sample_of(problem: LinearInt4Problem, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    return layer_sample(problem, random_weight, rows)


def _sample(problem: LinearInt4Problem) -> Sample:
    return sample_of(some_outputs(problem), CHECKED_ROWS)


OP: Op[LinearInt4Problem] = Op(
    name="linear_int4",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_int4.triton_linear_int4:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
