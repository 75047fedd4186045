"""The GEMM of each head in one Triton kernel. A result is one sum along the inputs in one order;
steps of few tokens take a smaller tile where that gives the same bits: more programs, whose weights
are asked for (into the second-level cache) before the kernel waits for the one before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.head_linear.op import HeadLinear, HeadLinearProblem, check_operands
from headrace.back.kernels.linear.triton_skinny import prefetch_rows
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    has_known_products,
    launch,
    power_of_two,
    unsupported,
)

FEW, MANY = 16, 64
"""Tokens of a tile."""
OUTPUTS, INPUTS = 64, 64
"""Of a tile, and of a step of its sum."""
FEW_OUTPUTS, FEW_STAGES = 16, 4
"""Of a tile of few tokens, and steps on their way to it."""
LEAST_PREFETCH = 64
"""Inputs of a row below which it is not worth a line of its own."""


@triton.jit
def head_linear_kernel(
    x, weight, y, num_tokens, x_token_stride, x_head_stride, y_token_stride, y_head_stride,
    I: tl.constexpr, O: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens x tiles of outputs, heads. PREFETCH: inputs that are asked for early, a
    power of two, 0: none."""
    TILES: tl.constexpr = (O + N - 1) // N
    i_h = tl.program_id(1).to(tl.int64)
    o_m = tl.program_id(0) // TILES * M + tl.arange(0, M)
    o_n = tl.program_id(0) % TILES * N + tl.arange(0, N)
    if DEPENDENT and PREFETCH > 0:
        prefetch_rows(weight, i_h * O + tl.minimum(o_n, O - 1), I, PREFETCH)
    enter(DEPENDENT)
    m_m, m_n = o_m < num_tokens, o_n < O
    p_x = x + i_h * x_head_stride + o_m.to(tl.int64)[:, None] * x_token_stride
    p_w = weight + (i_h * O + o_n[None, :]) * I
    b_acc = tl.zeros([M, N], tl.float32)
    for begin in range(0, I, K):
        o_k = begin + tl.arange(0, K)
        m_k = o_k < I
        b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_w + o_k[:, None], mask=m_n[None, :] & m_k[:, None], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    p_y = y + i_h * y_head_stride + o_m.to(tl.int64)[:, None] * y_token_stride + o_n[None, :]
    tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def bind(problem: HeadLinearProblem, weight_HOI: torch.Tensor) -> HeadLinear:
    """The kernel for one layer; keeps the weight."""
    weight_HOI = weight_HOI.contiguous()
    has_few = has_known_products() and problem.dtype is not torch.float32
    prefetched = power_of_two(problem.inputs + 1) // 2
    prefetched = prefetched if prefetched >= LEAST_PREFETCH else 0

    def head_linear(x_THI: torch.Tensor, y_THO: torch.Tensor) -> None:
        check_operands(problem, x_THI, y_THO)
        num_tokens = x_THI.shape[0]
        rows, outputs, early, stages = MANY, OUTPUTS, 0, 2
        if has_few and num_tokens <= FEW:
            rows, outputs, early, stages = FEW, FEW_OUTPUTS, prefetched, FEW_STAGES
        tiles = triton.cdiv(num_tokens, rows) * triton.cdiv(problem.outputs, outputs)
        head_linear_kernel[(tiles, problem.heads)](
            x_THI, weight_HOI, y_THO, num_tokens, *x_THI.stride()[:2], *y_THO.stride()[:2],
            I=problem.inputs, O=problem.outputs, M=rows, N=outputs, K=INPUTS, PREFETCH=early,
            num_warps=4, num_stages=stages, **launch(x_THI.device),
        )  # fmt: skip

    return head_linear


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
