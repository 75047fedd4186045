"""The fused linear layer: small products in one kernel, large ones by cuBLAS between the kernels of the parts."""

from __future__ import annotations

from collections.abc import Callable

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
    product = Product(
        weight_OI=weight_OI,
        bias_O=bias_O,
        norm_I=norm_weight_I,
        eps=problem.eps or 0.0,
        activation=problem.activation or "",
        add=problem.add,
    )
    run_for, large = small(product), _large(problem, product)

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        run = run_for(len(x_TI))
        if run is None:
            return large(x_TI, residual_TY)
        y_TY = x_TI.new_empty(len(x_TI), problem.results) if residual_TY is None else residual_TY
        run(x_TI, y_TY)
        return y_TY

    return fused_linear


def _large(problem: FusedLinearProblem, product: Product) -> FusedLinear:
    weight_OI, bias_O = product.weight_OI, product.bias_O
    identity: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # noqa: E731
    norm = activate = identity
    if product.norm_I is not None:
        norm = triton_rms_norm.bind_norm(norm_problem(problem), product.norm_I)
    if problem.activation is not None:
        activate = triton_gated_act.bind(activation_problem(problem))

    def large(x_TI: torch.Tensor, residual_TY: torch.Tensor | None) -> torch.Tensor:
        if problem.add and bias_O is None and problem.activation is None:
            assert residual_TY is not None
            return residual_TY.addmm_(norm(x_TI), weight_OI.t())
        y_TY = activate(F.linear(norm(x_TI), weight_OI, bias_O))
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return large


def _supports(problem: FusedLinearProblem) -> str | None:
    return refusal(problem.inputs, problem.activation) or unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
