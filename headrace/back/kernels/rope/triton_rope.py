"""Rotary position embedding in Triton: a program rotates some heads of a token, of the queries or
of the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.rope.op import Rope, RopeProblem
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

HEADS = 8
"""Of a program."""


@triton.jit
def rotate_heads(
    p_x, o_h, m_h, head_stride, p_angles, HALF: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr
):
    """Rotates the HALF pairs that begin at p_x of the heads o_h, in place. F: HALF, padded."""
    o_f = tl.arange(0, F)
    m_f = o_f < HALF
    o_a = 2 * o_f if PAIRS else o_f
    APART: tl.constexpr = 1 if PAIRS else HALF
    b_cos = tl.load(p_angles + o_f, mask=m_f, other=0.0)[None, :]
    b_sin = tl.load(p_angles + HALF + o_f, mask=m_f, other=0.0)[None, :]
    p_a = p_x + o_h.to(tl.int64)[:, None] * head_stride + o_a[None, :]
    m_a = m_h[:, None] & m_f[None, :]
    b_a = tl.load(p_a, mask=m_a, other=0.0)
    b_b = tl.load(p_a + APART, mask=m_a, other=0.0)
    dtype = b_a.dtype
    b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    tl.store(p_a, (b_a * b_cos - b_b * b_sin).to(dtype), mask=m_a)
    tl.store(p_a + APART, (b_b * b_cos + b_a * b_sin).to(dtype), mask=m_a)


@triton.jit(do_not_specialize=["heads", "kv_heads", "query_tiles"])
def rope_kernel(
    q, k, positions, angles, heads, kv_heads, query_tiles, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, H: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr,
    PAIRS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of H heads: those of the queries, then those of the keys."""
    enter(DEPENDENT)
    i_t, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_angles = angles + tl.load(positions + i_t).to(tl.int64) * (2 * HALF)
    o_h = tl.arange(0, H)
    if i_tile < query_tiles:
        o_h += i_tile * H
        p_q = q + i_t * q_token_stride
        rotate_heads(p_q, o_h, o_h < heads, q_head_stride, p_angles, HALF, F, PAIRS)
    else:
        o_h += (i_tile - query_tiles) * H
        p_k = k + i_t * k_token_stride
        rotate_heads(p_k, o_h, o_h < kv_heads, k_head_stride, p_angles, HALF, F, PAIRS)


def bind(problem: RopeProblem) -> Rope:
    """The kernel of one rotation."""
    half = problem.rotary_dim // 2
    constants = {
        "H": HEADS, "HALF": half, "F": power_of_two(half), "PAIRS": problem.layout == "pairs",
    }  # fmt: skip

    def rope(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor
    ) -> None:
        assert q_THD.stride(2) == k_TKD.stride(2) == 1, (q_THD.stride(), k_TKD.stride())
        assert table_PR.is_contiguous() and table_PR.shape[1] == 2 * half, table_PR.shape
        heads, kv_heads = q_THD.shape[1], k_TKD.shape[1]
        query_tiles = triton.cdiv(heads, HEADS)
        tiles = query_tiles + triton.cdiv(kv_heads, HEADS)
        if not tiles or not len(positions_T):
            return
        rope_kernel[(len(positions_T), tiles)](
            q_THD, k_TKD, positions_T.contiguous(), table_PR, heads, kv_heads, query_tiles,
            *q_THD.stride()[:2], *k_TKD.stride()[:2], num_warps=2, **constants,
            **launch(q_THD.device),
        )  # fmt: skip

    return rope


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
