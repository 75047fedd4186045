"""The fused linear layer: one token in one kernel; more with the norm before on its own, where linear/table.py has a
plan for them; the others by cuBLAS between the kernels of the parts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.fused_linear.op import (
    FusedLinear,
    FusedLinearProblem,
    activation_problem,
    norm_problem,
)
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.linear.triton_small import Product, refusal, small
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.rms_norm import triton_rms_norm
from headrace.back.kernels.triton.wrap import unsupported


def bind(
    problem: FusedLinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> FusedLinear:
    """The kernels for one weight, read as it is."""
    weight_OI = weight_OI.contiguous()
    after = Product(
        weight_OI=weight_OI,
        bias_O=bias_O,
        activation=problem.activation or "",
        add=problem.add,
    )
    several = small(after)
    one, norm = several, None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        one = small(replace(after, norm_I=norm_weight_I, eps=problem.eps))
        norm = triton_rms_norm.bind_norm(norm_problem(problem), norm_weight_I)
    large = _large(problem, weight_OI, bias_O)

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = len(x_TI)
        run = one(num_tokens)
        if run is None and norm is not None:
            x_TI, run = norm(x_TI), several(num_tokens)
        if run is None:
            return large(x_TI, residual_TY)
        y_TY = x_TI.new_empty(num_tokens, problem.results) if residual_TY is None else residual_TY
        run(x_TI, y_TY)
        return y_TY

    return fused_linear


def _large(
    problem: FusedLinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> FusedLinear:
    """The product by cuBLAS, and what comes after it."""
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


def _supports(problem: FusedLinearProblem) -> str | None:
    return refusal(problem.inputs, problem.activation) or unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
