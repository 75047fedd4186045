"""Merges two partial results of attention in Triton: a program takes the heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.merge_attention.op import (
    MergeAttention,
    MergeAttentionProblem,
    check_operands,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

TILE = 4096
"""Values of a program, unless one head has more."""


@triton.jit
def merge_attention_kernel(
    out, lse, other, other_lse,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T, groups of H heads)."""
    i_token = tl.program_id(0).to(tl.int64)
    enter(DEPENDENT)
    o_h = tl.program_id(1) * H + tl.arange(0, H)
    o_d = tl.arange(0, D)
    m_h = o_h < HEADS
    m_hd = m_h[:, None] & (o_d < HEAD_DIM)[None, :]
    o_row = i_token * HEADS + o_h
    b_left = tl.load(lse + o_row, mask=m_h, other=0.0)
    b_right = tl.load(other_lse + o_row, mask=m_h, other=0.0)
    b_top = tl.where(b_left > b_right, b_left, b_right)  # a NaN of either stays: see b_sum
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_left = tl.exp(b_left - b_base)
    b_right = tl.exp(b_right - b_base)
    b_sum = b_left + b_right
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_left = (b_left / b_divisor)[:, None]
    b_right = (b_right / b_divisor)[:, None]
    o_hd = o_row[:, None] * HEAD_DIM + o_d[None, :]
    b_out = tl.load(out + o_hd, mask=m_hd, other=0.0).to(tl.float32)
    b_other = tl.load(other + o_hd, mask=m_hd, other=0.0).to(tl.float32)
    b_out = tl.where(b_left == 0.0, 0.0, b_out * b_left)
    b_other = tl.where(b_right == 0.0, 0.0, b_other * b_right)
    tl.store(out + o_hd, (b_out + b_other).to(out.dtype.element_ty), mask=m_hd)
    tl.store(lse + o_row, b_top + tl.log(b_sum), mask=m_h)


def bind(problem: MergeAttentionProblem) -> MergeAttention:
    """The kernel for one layer's heads."""
    depth = power_of_two(problem.head_dim)
    heads = min(power_of_two(problem.heads), max(1, TILE // depth))
    groups = triton.cdiv(problem.heads, heads)

    def merge(
        out_THD: torch.Tensor, lse_TH: torch.Tensor, other_THD: torch.Tensor, other_TH: torch.Tensor
    ) -> None:
        check_operands(problem, out_THD, lse_TH, other_THD, other_TH)
        merge_attention_kernel[(len(out_THD), groups)](
            out_THD, lse_TH, other_THD, other_TH, HEADS=problem.heads, HEAD_DIM=problem.head_dim,
            H=heads, D=depth, num_warps=4, **launch(out_THD.device),
        )  # fmt: skip

    return merge


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
