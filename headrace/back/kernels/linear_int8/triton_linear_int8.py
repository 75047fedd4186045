"""Which kernel serves how many tokens of a weight of 8-bit integers: one token gemv (with the
norm), up to 64 skinny (both of kernels/linear, which turn the numbers into floats in registers),
more the library's GEMM with the weight dequantized before it, or, if tokens become int8, the
GEMM of integers (linear/triton_scaled_gemm.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from headrace.back.kernels.fused_linear.around import LayerGemm, activation_problem
from headrace.back.kernels.fused_linear.triton_around import (
    after_norm,
    bind_int8_rows,
    bind_norm_before,
    refusal_of,
    result_for,
)
from headrace.back.kernels.linear.dequantized import bind_dequantized
from headrace.back.kernels.linear.table import GemmPlan, padded
from headrace.back.kernels.linear.triton_dequantize_bytes import dequantize_into
from headrace.back.kernels.linear.triton_small import Gemm, Launch, gemm_device_of, launcher
from headrace.back.kernels.linear_fp8.triton_linear_fp8 import plan_of as byte_plan
from headrace.back.kernels.linear_int8.layout import GROUPS, Int8Weight, zero_sums
from headrace.back.kernels.linear_int8.op import (
    CHECKED_ROWS,
    STREAMED_TOKENS,
    LinearInt8Problem,
    sample_of,
)
from headrace.back.kernels.op import Kernel, PlanCheck


def plan_of(weight: Int8Weight, tokens: int, *, gated: bool, sms: int) -> GemmPlan:
    """As of weights of e4m3 numbers. Of several tokens a step is a group of 128 or several smaller
    ones, whose weights are made before the product: steps of 16 inputs, a group of Q6_K, took 350
    us of a layer of 12288 to 4096 and 32 tokens (H200)."""
    return byte_plan(weight.outputs, weight.inputs, tokens, gated=gated, sms=sms)


def bind(
    problem: LinearInt8Problem,
    weight: Int8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> LayerGemm:
    """The kernels for one weight, read as it is."""
    several = Gemm(
        weight_OI=weight.values_OI,
        scales_OG=weight.scales_OG,
        minima_OG=weight.minima_OG,
        group=weight.group or weight.inputs,
        bias_O=bias_O,
        activation=problem.activation or "",
        add=problem.add,
    )
    one = replace(several, norm_I=norm_weight_I, eps=problem.eps or 0.0)
    norm = bind_norm_before(problem, norm_weight_I)
    act = None if problem.activation is None else activation_problem(problem)
    if problem.int8_rows:
        many = bind_int8_rows(
            problem, lambda: (weight.values_OI, weight.scales_OG), weight.group,
            _bias_of(weight, bias_O), norm_weight_I, scale_1=weight.inputs_1, zero_1=weight.zero_1,
        )  # fmt: skip
    else:
        dequantized = bind_dequantized(
            weight, _dequantize_into, bias_O, dtype=problem.dtype, activation=act, add=problem.add,
            wide=problem.wide,
        )  # fmt: skip
        many = after_norm(norm, dequantized)

    @cache
    def launch_of(tokens: int) -> Launch:
        sms = gemm_device_of(weight.device).sms
        plan = plan_of(weight, tokens, gated=act is not None, sms=sms)
        return launcher(one if tokens == 1 else several, plan, tokens)

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = len(x_TI)
        if num_tokens > STREAMED_TOKENS:
            return many(x_TI, residual_TY)
        if norm is not None and num_tokens > 1:
            x_TI = norm(x_TI)
        y_TY = result_for(problem, x_TI, residual_TY)
        launch_of(padded(num_tokens))(x_TI, y_TY)
        return y_TY

    return linear


def _bias_of(weight: Int8Weight, bias_O: torch.Tensor | None) -> torch.Tensor | None:
    """With what a zero point of the tokens adds taken off, float32 then."""
    above_O = zero_sums(weight)
    if above_O is None:
        return bias_O
    return -above_O if bias_O is None else bias_O.float() - above_O


def _dequantize_into(weight: Int8Weight, y_OI: torch.Tensor) -> None:
    dequantize_into(weight.values_OI, weight.scales_OG, weight.group, y_OI, weight.minima_OG)


def plans(problem: LinearInt8Problem) -> list[PlanCheck]:
    """Each kernel on the whole shape."""
    return [
        PlanCheck(name=f"{tokens} tokens", sample=partial(sample_of, problem, (tokens,)), bind=bind)
        for tokens in CHECKED_ROWS
    ]


def _supports(problem: LinearInt8Problem) -> str | None:
    reason = refusal_of(problem, GROUPS)
    if reason is not None:
        return reason
    if problem.group is not None and problem.inputs % problem.group:
        return f"{problem.inputs} inputs are no multiple of {problem.group}"
    if problem.int8_rows and (problem.group == 16 or problem.minima):
        return (
            "multiplies int8 tokens by integers without minima, of at least 32 that share a scale"
        )
    if problem.fixed and (not problem.int8_rows or problem.group is not None):
        return "holds a scale of int8 tokens with weights of one group"
    return None


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    plans=plans,
    note=lambda problem: (
        f"from {STREAMED_TOKENS + 1} tokens on "
        f"{'int8 by int8' if problem.int8_rows else 'dequantized before the GEMM'}"
    ),
)
