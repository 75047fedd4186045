"""Which kernel serves how many tokens of a weight of 8-bit integers: one token gemv (with the
norm), up to 64 skinny (both of kernels/linear, which turn the numbers into floats in registers),
more the library's GEMM with the weight dequantized before it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from headrace.back.kernels.gated_act.triton_gated_act import ACTIVATIONS
from headrace.back.kernels.linear.dequantized import bind_dequantized
from headrace.back.kernels.linear.table import GemmPlan, padded
from headrace.back.kernels.linear.triton_small import Gemm, Launch, gemm_device_of, launcher
from headrace.back.kernels.linear_fp8.triton_linear_fp8 import plan_of as byte_plan
from headrace.back.kernels.linear_int8.layout import GROUPS, Int8Weight, dequantize_into
from headrace.back.kernels.linear_int8.op import (
    CHECKED_ROWS,
    STREAMED_TOKENS,
    Int8Linear,
    LinearInt8Problem,
    activation_problem,
    norm_problem,
    sample_of,
)
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.rms_norm import triton_rms_norm
from headrace.back.kernels.triton.wrap import unsupported

UNIT = 16
"""Inputs of a weight are a multiple of it."""


def plan_of(weight: Int8Weight, tokens: int, *, gated: bool, sms: int) -> GemmPlan:
    """As of weights of e4m3 numbers; of several tokens a step is a group, where there are some."""
    plan = byte_plan(weight.outputs, weight.inputs, tokens, gated=gated, sms=sms)
    if tokens == 1 or weight.group is None:
        return plan
    return replace(plan, k=weight.group, prefetch=plan.prefetch * plan.k // weight.group)


def bind(
    problem: LinearInt8Problem,
    weight: Int8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> Int8Linear:
    """The kernels for one weight, read as it is."""
    several = Gemm(
        weight_OI=weight.values_OI,
        scales_OG=weight.scales_OG,
        group=weight.group or weight.inputs,
        bias_O=bias_O,
        activation=problem.activation or "",
        add=problem.add,
    )
    one, norm = several, None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        one = replace(several, norm_I=norm_weight_I, eps=problem.eps)
        norm = triton_rms_norm.bind_norm(norm_problem(problem), norm_weight_I)
    act = None if problem.activation is None else activation_problem(problem)
    many = bind_dequantized(
        weight, dequantize_into, bias_O, dtype=problem.dtype, activation=act, add=problem.add,
        wide=problem.wide,
    )  # fmt: skip

    @cache
    def launch_of(tokens: int) -> Launch:
        sms = gemm_device_of(weight.device).sms
        plan = plan_of(weight, tokens, gated=act is not None, sms=sms)
        return launcher(one if tokens == 1 else several, plan, tokens)

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = len(x_TI)
        if norm is not None and num_tokens > 1:
            x_TI = norm(x_TI)
        if num_tokens > STREAMED_TOKENS:
            return many(x_TI, residual_TY)
        y_TY = residual_TY
        if y_TY is None:
            dtype = torch.float32 if problem.wide else problem.dtype
            y_TY = x_TI.new_empty(num_tokens, problem.results, dtype=dtype)
        launch_of(padded(num_tokens))(x_TI, y_TY)
        return y_TY

    return linear


def plans(problem: LinearInt8Problem) -> list[PlanCheck]:
    """Each kernel on the whole shape."""
    return [
        PlanCheck(name=f"{tokens} tokens", sample=partial(sample_of, problem, (tokens,)), bind=bind)
        for tokens in CHECKED_ROWS
    ]


def _supports(problem: LinearInt8Problem) -> str | None:
    reason = unsupported(problem.device, problem.dtype)
    if reason is not None:
        return reason
    if problem.inputs % UNIT:
        return f"{problem.inputs} inputs are no multiple of {UNIT}"
    if problem.group not in (None, *GROUPS):
        return f"scales of {', '.join(map(str, GROUPS))} inputs or of all, not of {problem.group}"
    if problem.group is not None and problem.inputs % problem.group:
        return f"{problem.inputs} inputs are no multiple of {problem.group}"
    if problem.activation is not None and problem.activation not in ACTIVATIONS:
        return f"does not know {problem.activation}"
    return None


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    plans=plans,
    note=lambda problem: f"from {STREAMED_TOKENS + 1} tokens on dequantized before the GEMM",
)
