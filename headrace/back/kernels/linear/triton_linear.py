"""y = x W^T + b: small products by our kernels where they measured faster, the others by cuBLAS."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear, LinearProblem
from headrace.back.kernels.linear.triton_small import Product, refusal, small
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import unsupported


def bind(problem: LinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    """The kernels for one weight, read as it is."""
    weight_OI = weight_OI.contiguous()
    run_for = small(Product(weight_OI=weight_OI, bias_O=bias_O))

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        run = run_for(len(x_TI))
        if run is None:
            return F.linear(x_TI, weight_OI, bias_O)
        y_TO = x_TI.new_empty(len(x_TI), problem.outputs)
        run(x_TI, y_TO)
        return y_TO

    def wide(x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI).float()

    return wide if problem.wide else linear


def _supports(problem: LinearProblem) -> str | None:
    return refusal(problem.inputs, None) or unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
