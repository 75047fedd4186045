"""A linear layer with a weight of 8-bit integers, with what a decoder layer puts around it: y =
act(norm(x) W^T + b), or added into the residual. For GPUs; CPUs read such weights in panels
(linear_quant, linear_blocks).

`bind(problem, weight, bias_O | None, norm_weight_I | None)` as of kernels/fused_linear/around.py.

Activations stay as they are, and products are float32; but with `int8_rows` more than
STREAMED_TOKENS of them become int8, a scale for each token or one for all that the weight holds
(with a zero point, what that adds to the sums taken off again), and products of a group's integers
are summed exactly. Fewer are bound by reading the weight, whatever they are.
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
from headrace.back.kernels.linear_int8.layout import Int8Weight, dequantize, empty
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance, random_tensor

STREAMED_TOKENS = 64
"""The kernels that stream the weight take up to so many."""
CHECKED_ROWS = (1, 5, 20, 40, STREAMED_TOKENS + 16)


@dataclass(frozen=True, kw_only=True)
class LinearInt8Problem(QuantizedLayerProblem):
    """The layer, and the groups of its weight; `int8_rows`: many tokens become int8. `minima`:
    groups have them. `fixed`: tokens have one scale, held with the weight; `zero`: and a zero
    point."""

    int8_rows: bool = False
    minima: bool = False
    fixed: bool = False
    zero: bool = False


def int8_refusal(dtype: torch.dtype) -> str | None:
    """Why no kernel of ours can serve on this machine's GPU, whatever the weight's size, if so."""
    return gpu_refusal(OP, LinearInt8Problem, dtype)


def bind_reference(
    problem: LinearInt8Problem,
    weight: Int8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> LayerGemm:
    """The definition, products in float32."""

    def gemm(x_TI: torch.Tensor) -> torch.Tensor:
        if not problem.int8_rows or len(x_TI) <= STREAMED_TOKENS:
            return x_TI.float() @ dequantize(weight).T
        rows = scaled_rows(x_TI, None, torch.int8, weight.inputs_1, weight.zero_1)
        values_TI = rows.values_TI.float()
        if weight.zero_1 is not None:
            values_TI -= weight.zero_1
        return values_TI @ dequantize(weight).T * rows.scales_TG

    return bind_around(problem, gemm, bias_O, norm_weight_I)


def random_weight(problem: LinearInt8Problem, generator: torch.Generator) -> Int8Weight:
    """Integers over their whole range; products are about 1."""
    weight = empty(
        problem.outputs, problem.inputs, problem.group, device=problem.device,
        int8_rows=problem.int8_rows, minima=problem.minima,
    )  # fmt: skip
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    step = 1 + (1 << 24) // problem.inputs
    for first in range(0, problem.outputs, step):
        values = weight.values_OI[first : first + step]
        values.copy_((random_tensor(*values.shape, **new) * 40).round_().clamp_(-128, 127))
    spread = random_tensor(*weight.scales_OG.shape, **new).abs_().add_(0.5)
    weight.scales_OG.copy_(spread / (40 * problem.inputs**0.5))
    if weight.minima_OG is not None:
        middle = random_tensor(*weight.scales_OG.shape, **new) * 40
        weight.minima_OG.copy_(weight.scales_OG * middle)
    if problem.fixed:
        new_1 = {"dtype": torch.float32, "device": problem.device}
        zero_1 = torch.full((1,), -7.0, **new_1) if problem.zero else None
        weight = replace(weight, inputs_1=torch.full((1,), 1 / 40, **new_1), zero_1=zero_1)
    return weight


def sample_of(problem: LinearInt8Problem, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    return layer_sample(problem, random_weight, rows)


def _sample(problem: LinearInt8Problem) -> Sample:
    return sample_of(some_outputs(problem), CHECKED_ROWS)


OP: Op[LinearInt8Problem] = Op(
    name="linear_int8",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_int8.triton_linear_int8:KERNEL",),
    sample=_sample,
    # Where the whole weight is dequantized its numbers are rounded to the dtype; a token's value
    # half-way between two integers may become either.
    tolerance=lambda problem: max(float_tolerance(problem.dtype), 4e-3),
)
