"""y = x W^T + b: small GEMMs by our kernels where they measured faster, the others by cuBLAS."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear, LinearProblem
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


def bind(problem: LinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    """The kernels for one weight, read as it is."""
    weight_OI = weight_OI.contiguous()
    run_for = small(Gemm(weight_OI=weight_OI, bias_O=bias_O))

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        run = run_for(len(x_TI))
        if run is None:
            return _by_library(problem, x_TI, weight_OI, bias_O)
        y_TO = _result(problem, x_TI)
        run(x_TI, y_TO)
        return y_TO

    return linear


def _by_library(
    problem: LinearProblem,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    """cuBLAS's float32 sums are not rounded on their way into a float32 result."""
    if not problem.wide or problem.dtype is torch.float32:
        return F.linear(x_TI, weight_OI, bias_O)
    if not x_TI.is_cuda or torch.version.hip is not None:
        return F.linear(x_TI, weight_OI, bias_O).float()
    y_TO = torch.mm(x_TI, weight_OI.t(), out_dtype=torch.float32)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def _result(problem: LinearProblem, x_TI: torch.Tensor) -> torch.Tensor:
    """Our kernels round their float32 sums to what y holds."""
    dtype = torch.float32 if problem.wide else problem.dtype
    return x_TI.new_empty(len(x_TI), problem.outputs, dtype=dtype)


def plans(problem: LinearProblem) -> list[PlanCheck]:
    """Each plan of our kernels on the whole shape, then the library's GEMM."""
    weight_OI = scratch_weight(
        problem.outputs, problem.inputs, dtype=problem.dtype, device=problem.device
    )
    gemm = Gemm(weight_OI=weight_OI)
    return plan_checks(
        [(gemm, plan, tokens) for plan, tokens in distinct_plans(gemm)],
        sample=partial(plan_sample, problem),
        bind_plan=_bind_plan,
        bind=bind,
    )


def _bind_plan(
    _: Gemm,
    plan: GemmPlan,
    tokens: int,
    problem: LinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
) -> Linear:
    """The layer by one plan."""
    run = launcher(Gemm(weight_OI=weight_OI, bias_O=bias_O), plan, padded(tokens))

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = _result(problem, x_TI)
        run(x_TI, y_TO)
        return y_TO

    return linear


def plan_sample(problem: LinearProblem, tokens: int) -> Sample:
    """Inputs of the problem's own shape, made on its device."""
    new = {
        "dtype": problem.dtype,
        "device": problem.device,
        "generator": sample_generator(problem.device),
    }
    weight = scratch_weight(
        problem.outputs, problem.inputs, dtype=problem.dtype, device=problem.device
    )
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    x = random_tensor(tokens, problem.inputs, **new)
    return Sample(problem=problem, weights=(weight, bias), arguments=(x,))


def _supports(problem: LinearProblem) -> str | None:
    return refusal(problem.inputs, None) or unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    plans=plans,
    note=lambda problem: source_of(problem.device, problem.outputs, problem.inputs),
)
