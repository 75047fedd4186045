"""The fused linear layer in one order of sums: the norm in a kernel of its own, then
linear/triton_fixed.py."""

from __future__ import annotations

from functools import partial

import torch

from headrace.back.kernels.fused_linear.op import FusedLinear, FusedLinearProblem
from headrace.back.kernels.fused_linear.triton_around import bind_norm_before, result_for
from headrace.back.kernels.fused_linear.triton_fused_linear import plan_sample
from headrace.back.kernels.linear.triton_fixed import fixed, tile_checks
from headrace.back.kernels.linear.triton_small import Gemm, refusal
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.wrap import unsupported


def bind(
    problem: FusedLinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> FusedLinear:
    """The kernels for one weight, read as it is."""
    run = fixed(
        Gemm(
            weight_OI=weight_OI.contiguous(),
            bias_O=bias_O,
            activation=problem.activation or "",
            add=problem.add,
        )
    )
    norm = bind_norm_before(problem, norm_weight_I)

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        if norm is not None:
            x_TI = norm(x_TI)
        y_TY = result_for(problem, x_TI, residual_TY)
        run(x_TI, y_TY)
        return y_TY

    return fused_linear


def _supports(problem: FusedLinearProblem) -> str | None:
    return refusal(problem.inputs, problem.activation) or unsupported(problem.device, problem.dtype)


def plans(problem: FusedLinearProblem) -> list[PlanCheck]:
    """Each tile, on the whole shape."""
    return tile_checks(partial(plan_sample, problem), bind)


KERNEL = Kernel(
    name="triton fixed order", supports=_supports, bind=bind, plans=plans, invariant=True
)
