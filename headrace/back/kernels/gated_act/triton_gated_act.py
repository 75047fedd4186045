"""Gated activation in Triton: one program per token and tile of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_act.op import GatedAct, GatedActProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
TILE = 1024


@triton.jit
def activate(b_x, ACTIVATION: tl.constexpr):
    """act(x) in float32."""
    if ACTIVATION == "silu":
        b_x = b_x * tl.sigmoid(b_x)
    elif ACTIVATION == "gelu":
        b_x = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        b_inner = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_x = b_x * tl.sigmoid(2.0 * b_inner)  # (1 + tanh a) / 2 = sigmoid 2a
    elif ACTIVATION == "quick_gelu":
        b_x = b_x * tl.sigmoid(1.702 * b_x)
    elif ACTIVATION == "sigmoid":
        b_x = tl.sigmoid(b_x)
    elif ACTIVATION == "tanh":
        b_x = 2.0 * tl.sigmoid(2.0 * b_x) - 1.0
    else:
        b_x = tl.where(b_x < 0.0, 0.0, b_x)  # a NaN stays one
        if ACTIVATION == "relu2":
            b_x = b_x * b_x
    return b_x


@triton.jit
def gated_act_kernel(
    x,
    y,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < WIDTH
    enter(DEPENDENT)
    p_gate = x + i_token * x_stride + o_i
    b_gate = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + WIDTH, mask=m_i, other=0.0).to(tl.float32)
    b_y = activate(b_gate, ACTIVATION) * b_up
    tl.store(y + i_token * WIDTH + o_i, b_y.to(y.dtype.element_ty), mask=m_i)


def bind(problem: GatedActProblem) -> GatedAct:
    """The kernel for one width and activation."""
    width = problem.width
    block = min(TILE, power_of_two(width, least=32))

    def gated_act(gate_up_T2I: torch.Tensor) -> torch.Tensor:
        assert gate_up_T2I.stride(1) == 1, gate_up_T2I.stride()
        num_tokens = gate_up_T2I.shape[0]
        y_TI = gate_up_T2I.new_empty(num_tokens, width)
        gated_act_kernel[(num_tokens, triton.cdiv(width, block))](
            gate_up_T2I, y_TI, gate_up_T2I.stride(0), WIDTH=width, BLOCK=block,
            ACTIVATION=problem.activation, num_warps=4, **launch(y_TI.device),
        )  # fmt: skip
        return y_TI

    return gated_act


def _supports(problem: GatedActProblem) -> str | None:
    if problem.activation not in ACTIVATIONS:
        return f"does not know {problem.activation}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    invariant=True,
)
