"""Activation in Triton: one program per tile of elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.gated_act.triton_gated_act import ACTIVATIONS as GATED
from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

ACTIVATIONS = (*GATED, "quick_gelu", "tanh", "sigmoid")
TILE = 1024


@triton.jit
def activation_kernel(
    x, y, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr
):
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < count
    enter(DEPENDENT)
    b_y = activate(tl.load(x + o_i, mask=m_i, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(y + o_i, b_y.to(y.dtype.element_ty), mask=m_i)


def bind(problem: ActivationProblem) -> Activation:
    """The kernel of one activation."""

    def activation(x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.is_contiguous(), x_TI.stride()
        y_TI = torch.empty_like(x_TI)
        activation_kernel[(triton.cdiv(x_TI.numel(), TILE),)](
            x_TI, y_TI, x_TI.numel(), BLOCK=TILE, ACTIVATION=problem.activation, num_warps=4,
            **launch(x_TI.device),
        )  # fmt: skip
        return y_TI

    return activation


def _supports(problem: ActivationProblem) -> str | None:
    if problem.activation not in ACTIVATIONS:
        return f"does not know {problem.activation}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
