"""The fused linear layer: one token in one kernel; more with the norm before on its own, where
linear/table.py has a plan for them; the others by cuBLAS between the kernels of the parts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from headrace.back.kernels.fused_linear.around import activation_problem
from headrace.back.kernels.fused_linear.op import FusedLinear, FusedLinearProblem
from headrace.back.kernels.fused_linear.triton_around import bind_norm_before, result_for
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.linear.table import GemmPlan, padded
from headrace.back.kernels.linear.triton_small import (
    Gemm,
    distinct_plans,
    launcher,
    plan_checks,
    refusal,
    small,
    source_of,
)
from headrace.back.kernels.op import (
    Kernel,
    PlanCheck,
    Sample,
    random_tensor,
    sample_generator,
    scratch_weight,
)
from headrace.back.kernels.triton.wrap import unsupported


def bind(
    problem: FusedLinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> FusedLinear:
    """The kernels for one weight, read as it is."""
    weight_OI = weight_OI.contiguous()
    after = Gemm(
        weight_OI=weight_OI,
        bias_O=bias_O,
        activation=problem.activation or "",
        add=problem.add,
    )
    several = small(after)
    one = small(replace(after, norm_I=norm_weight_I, eps=problem.eps or 0.0))
    norm = bind_norm_before(problem, norm_weight_I)
    large = _large(problem, weight_OI, bias_O)

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = len(x_TI)
        run = one(num_tokens)
        if run is None and norm is not None:
            x_TI, run = norm(x_TI), several(num_tokens)
        if run is None:
            return large(x_TI, residual_TY)
        y_TY = result_for(problem, x_TI, residual_TY)
        run(x_TI, y_TY)
        return y_TY

    return fused_linear


def _large(
    problem: FusedLinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> FusedLinear:
    """The GEMM by cuBLAS, and what comes after it."""
    activate = None
    if problem.activation is not None:
        activate = triton_gated_act.bind(activation_problem(problem))

    def large(x_TI: torch.Tensor, residual_TY: torch.Tensor | None) -> torch.Tensor:
        if residual_TY is not None and bias_O is None and activate is None:
            return residual_TY.addmm_(x_TI, weight_OI.t())
        y_TY = F.linear(x_TI, weight_OI, bias_O)
        if activate is not None:
            y_TY = activate(y_TY)
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return large


def plans(problem: FusedLinearProblem) -> list[PlanCheck]:
    """Each plan of our kernels on the whole shape, then the library's GEMM between the kernels of
    the parts."""
    weight_OI, bias_O, norm_I = _plan_weights(problem)
    several = Gemm(
        weight_OI=weight_OI, bias_O=bias_O, activation=problem.activation or "", add=problem.add
    )
    gemms = [(several, plan, tokens) for plan, tokens in distinct_plans(several)]
    if problem.eps is not None:
        one = replace(several, norm_I=norm_I, eps=problem.eps)
        gemms = [several_of for several_of in gemms if several_of[2] > 1]
        gemms += [(one, plan, tokens) for plan, tokens in distinct_plans(one)]
    return plan_checks(gemms, sample=partial(plan_sample, problem), bind_plan=_bind_plan, bind=bind)


def _bind_plan(
    gemm: Gemm,
    plan: GemmPlan,
    tokens: int,
    problem: FusedLinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> FusedLinear:
    """The layer by one plan; a norm that is not in its kernel goes before it."""
    own_norm = None if gemm.norm_I is None else norm_weight_I
    bound = replace(gemm, weight_OI=weight_OI, bias_O=bias_O, norm_I=own_norm)
    run = launcher(bound, plan, padded(tokens))
    norm = bind_norm_before(problem, norm_weight_I) if gemm.norm_I is None else None

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        x_TI = x_TI if norm is None else norm(x_TI)
        y_TY = result_for(problem, x_TI, residual_TY)
        run(x_TI, y_TY)
        return y_TY

    return fused_linear


def _plan_weights(
    problem: FusedLinearProblem,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    new = {"device": problem.device, "generator": sample_generator(problem.device)}
    weight = scratch_weight(
        problem.outputs, problem.inputs, dtype=problem.dtype, device=problem.device
    )
    bias = random_tensor(problem.outputs, dtype=problem.dtype, **new) if problem.bias else None
    norm = None
    if problem.eps is not None:
        norm = random_tensor(problem.inputs, dtype=torch.float32, **new)
    return weight, bias, norm


def plan_sample(problem: FusedLinearProblem, tokens: int) -> Sample:
    """Inputs of the problem's own shape, made on its device."""
    new = {
        "dtype": problem.dtype,
        "device": problem.device,
        "generator": sample_generator(problem.device),
    }
    x = random_tensor(tokens, problem.inputs, **new)
    residual = random_tensor(tokens, problem.results, **new) if problem.add else None
    return Sample(problem=problem, weights=_plan_weights(problem), arguments=(x, residual))


def _supports(problem: FusedLinearProblem) -> str | None:
    return refusal(problem.inputs, problem.activation) or unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    plans=plans,
    note=lambda problem: source_of(
        problem.device, problem.outputs, problem.inputs, gated=problem.activation is not None
    ),
)
