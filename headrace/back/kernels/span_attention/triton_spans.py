"""Attention inside spans in Triton: one program per head and tile of a span's queries, which goes
over the span's keys once (Dao 2023, FlashAttention-2).

A head is taken in two parts, the greatest power of two and what is left, so that heads of 72 or 80
do not cost those of 128. The second part begins early enough to be whole; queries are 0 where the
parts overlap. The list of tiles is made on the host and kept from layer to layer.

H heads, K KV heads, D dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.triton_softmax import softmax_weights
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.span_attention.op import SpanAttention, SpanAttentionProblem
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported
from headrace.back.kernels.upload import kept_copies, to_device

MAX_HEAD = 256
KEPT_LISTS = 8
UNIT = 8
"""Elements of a 16-bit type in the 16 bytes that one asynchronous load takes. Heads of 72 have
strides that are multiples of it, and not of the 16 that Triton would find by itself: without the
hint each element is loaded alone, and nothing overlaps with the products."""


@triton.jit
def _load(base, rows, columns, stride, m_rows, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a head's columns; those before FROM and behind WIDTH are 0."""
    m = m_rows[:, None] & ((columns >= FROM) & (columns < WIDTH))[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=m, other=0.0)


@triton.jit
def span_attention_kernel(
    q, k, v, y, tiles, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    v_token_stride, v_head_stride, factor, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, WINDOW: tl.constexpr,
    UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """tiles [P, 3] int32: first query, first token and end of its span. `factor`: scale *
    log2(e). Strides are in units of UNIT: where that is 8, 16 bytes of a 16-bit type are loaded at
    a time, asynchronously."""
    enter(DEPENDENT)
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(tiles + i_tile * 3).to(tl.int64)
    begin = tl.load(tiles + i_tile * 3 + 1).to(tl.int64)
    end = tl.load(tiles + i_tile * 3 + 2).to(tl.int64)
    o_m = first + tl.arange(0, M)
    m_m = o_m < end
    o_d, o_e = tl.arange(0, MAIN), WIDTH - REST + tl.arange(0, REST if REST else 1)
    p_q = q + i_head * (q_head_stride * UNIT)
    p_k = k + i_head // GROUP * (k_head_stride * UNIT)
    p_v = v + i_head // GROUP * (v_head_stride * UNIT)
    q_token_stride, k_token_stride = q_token_stride * UNIT, k_token_stride * UNIT
    v_token_stride = v_token_stride * UNIT
    b_q = _load(p_q, o_m, o_d, q_token_stride, m_m, 0, WIDTH)
    b_acc = tl.zeros([M, MAIN], tl.float32)
    if REST:
        b_q_rest = _load(p_q, o_m, o_e, q_token_stride, m_m, MAIN, WIDTH)
        b_acc_rest = tl.zeros([M, REST], tl.float32)
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    low, high = begin, end
    if WINDOW:
        low = tl.maximum(begin, first - WINDOW)
        high = tl.minimum(end, first + M + WINDOW)
    for o_tile in range(low, high, N):
        o_n = o_tile + tl.arange(0, N)
        m_n = o_n < high
        b_k = _load(p_k, o_n, o_d, k_token_stride, m_n, 0, WIDTH)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if REST:
            b_k = _load(p_k, o_n, o_e, k_token_stride, m_n, 0, WIDTH)
            b_s += tl.dot(b_q_rest, tl.trans(b_k), input_precision="ieee")
        m_s = m_n[None, :] & m_m[:, None]
        if WINDOW:
            o_far = o_m[:, None] - o_n[None, :]
            m_s = m_s & (o_far <= WINDOW) & (o_far >= -WINDOW)
        b_s = tl.where(m_s, b_s * factor, float("-inf"))
        b_p, b_shrink, b_max = softmax_weights(b_s, b_max, 1.0, True)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_w = b_p.to(b_q.dtype)
        b_v = _load(p_v, o_n, o_d, v_token_stride, m_n, 0, WIDTH)
        b_acc = b_acc * b_shrink[:, None] + tl.dot(b_w, b_v, input_precision="ieee")
        if REST:
            b_v = _load(p_v, o_n, o_e, v_token_stride, m_n, 0, WIDTH)
            b_acc_rest = b_acc_rest * b_shrink[:, None] + tl.dot(b_w, b_v, input_precision="ieee")
    b_sum = tl.where(m_m, b_sum, 1.0)
    p_y = y + (o_m * HEADS + i_head)[:, None] * WIDTH
    m_y = m_m[:, None]
    tl.store(p_y + o_d[None, :], b_acc / b_sum[:, None], mask=m_y & (o_d < WIDTH)[None, :])
    if REST:
        tl.store(p_y + o_e[None, :], b_acc_rest / b_sum[:, None], mask=m_y & (o_e >= MAIN)[None, :])


def bind(problem: SpanAttentionProblem) -> SpanAttention:
    """The kernel of one problem."""
    width, heads = problem.head_dim, problem.heads
    main, rest = parts(width)
    wide = problem.dtype is torch.float32
    num_m, num_n = (64, 32) if wide else (128, 64)

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        assert q_THD.stride(2) == k_TKD.stride(2) == v_TKD.stride(2) == 1
        y_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        tiles = _tiles(tuple(starts), num_m, q_THD.device)
        if not tiles.shape[0]:
            return y_THD
        strides = [one.stride(dim) for one in (q_THD, k_TKD, v_TKD) for dim in (0, 1)]
        unit = math.gcd(UNIT, *strides)
        span_attention_kernel[(tiles.shape[0], heads)](
            q_THD, k_TKD, v_TKD, y_THD, tiles, *(stride // unit for stride in strides),
            problem.scale * math.log2(math.e),
            HEADS=heads, GROUP=heads // problem.kv_heads, WIDTH=width, MAIN=main, REST=rest,
            WINDOW=problem.window or 0, UNIT=unit, M=num_m, N=num_n, num_warps=4 if wide else 8, num_stages=2,
            **launch(y_THD.device),
        )  # fmt: skip
        return y_THD

    return attend


def parts(width: int) -> tuple[int, int]:
    """The two parts of a head: powers of two, at least 16; 0: there is no second one."""
    main = max(16, 1 << (width.bit_length() - 1))
    left = width - main
    return main, max(16, 1 << (left - 1).bit_length()) if left > 0 else 0


def _tiles(starts: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    recorded = kept_copies()
    if recorded is None:
        return _listed(starts, size, device)
    return recorded.named((starts, size), lambda: _listed.__wrapped__(starts, size, device))


@lru_cache(maxsize=KEPT_LISTS)
def _listed(starts: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    lists = [
        (first, begin, end) for begin, end in pairwise(starts) for first in range(begin, end, size)
    ]
    return to_device(np.array(lists, np.int32).reshape(-1, 3), device)


def _supports(problem: SpanAttentionProblem) -> str | None:
    if problem.softcap is not None:
        return "knows no soft caps"
    if problem.head_dim > MAX_HEAD:
        return f"takes heads of at most {MAX_HEAD}, not {problem.head_dim}"
    if problem.device == "cuda" and problem.dtype is not torch.float32 and problem.head_dim % UNIT:
        return (
            f"loads heads of {problem.head_dim} one number at a time, which gave wrong ones on an "
            f"H200: no multiple of {UNIT}"
        )
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
