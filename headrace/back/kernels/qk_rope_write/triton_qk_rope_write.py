"""Norm of queries and keys, rotation and KV write in one Triton kernel: a program takes some heads
of one token.

A head lies in registers as the two halves of its rotated pairs, a and b, and the dimensions that
are not rotated, c. Caches of less than a byte a value are written by a second kernel
(kv_write/triton_narrow_write.py) from what this one leaves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from headrace.back.kernels.kv_write.quantized import LARGEST, SCALE_BYTES, typed
from headrace.back.kernels.kv_write.triton_narrow_write import NARROW, unfit_narrow
from headrace.back.kernels.kv_write.triton_narrow_write import write as write_narrow
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.qk_rope_write.op import QKRopeWrite, QKRopeWriteProblem
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import (
    launch,
    power_of_two,
    unsupported,
    unsupported_quantization,
)

TILE = 1024
"""Values a program takes, unless one head has more."""


@triton.jit
def _normed(
    b_a, b_b, b_c, b_scale, b_normed, p_weight, o_a, o_b, o_c, m_ab, m_c, REST: tl.constexpr
):
    """The parts of heads times scale and weight, where `b_normed`."""
    b_a = tl.where(b_normed, b_a * b_scale * tl.load(p_weight + o_a, mask=m_ab, other=0.0), b_a)
    b_b = tl.where(b_normed, b_b * b_scale * tl.load(p_weight + o_b, mask=m_ab, other=0.0), b_b)
    if REST:
        b_c = tl.where(b_normed, b_c * b_scale * tl.load(p_weight + o_c, mask=m_c, other=0.0), b_c)
    return b_a, b_b, b_c


@triton.jit
def _top(b_x, m_x):
    """The largest magnitude of each head; inf if one is not a number."""
    b_size = tl.where(m_x, tl.abs(b_x), 0.0)
    return tl.max(tl.where(b_size == b_size, b_size, float("inf")), axis=1)


@triton.jit
def _three_bits(b_x):
    """Rounded to what e4m3 can say, so that the conversion, which targets do differently, has
    nothing left to round."""
    bits = b_x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    b_normal = bits.to(tl.float32, bitcast=True)
    b_small = (b_x + 24576.0) - 24576.0  # steps of 2^-9
    return tl.where(tl.abs(b_x) < 0.015625, b_small, b_normal)


@triton.jit
def _two_bits(b_x):
    """The same of e5m2."""
    bits = b_x.to(tl.int32, bitcast=True)
    bits = (bits + 0xFFFFF + ((bits >> 21) & 1)) & -0x200000
    b_normal = bits.to(tl.float32, bitcast=True)
    b_small = (b_x + 192.0) - 192.0  # steps of 2^-16
    return tl.where(tl.abs(b_x) < 6.103515625e-05, b_small, b_normal)


@triton.jit
def stored(b_x, dtype: tl.constexpr, QUANTIZED: tl.constexpr, LARGEST: tl.constexpr):
    """Values as the cache keeps them; of quantized values, to the nearest one, ties to even. A lost
    head's are 0."""
    if QUANTIZED:
        b_x = tl.where(b_x == b_x, b_x, 0.0)
        b_x = tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST)
        if dtype == tl.int8:
            b_x = (b_x + 12582912.0) - 12582912.0
        elif LARGEST == 448.0:
            b_x = _three_bits(b_x)
        else:
            b_x = _two_bits(b_x)
    return b_x.to(dtype)


@triton.jit
def qk_rope_write_kernel(
    qkv,
    q_weight,
    k_weight,
    position,
    table,
    kv,
    scales,
    fixed,
    slot,
    qkv_stride,
    table_stride,
    block_stride,
    kind_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FIXED: tl.constexpr,
    PLACED: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Heads are counted through queries, keys and values. Unless PLACED, tokens go into the cache
    one after the other."""
    i_token = tl.program_id(0).to(tl.int64)
    o_head = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    m_head = o_head < HEADS + 2 * KV_HEADS
    SPLIT: tl.constexpr = ROTARY if ROTARY else HEAD_DIM // 2 * 2
    HALF: tl.constexpr = SPLIT // 2
    REST: tl.constexpr = SPLIT < HEAD_DIM
    o_pair = tl.arange(0, HALF_PADDED)[None, :]
    m_pair = o_pair < HALF
    if PAIRS:
        o_a, o_b = 2 * o_pair, 2 * o_pair + 1
    else:
        o_a, o_b = o_pair, o_pair + HALF
    o_c = SPLIT + tl.arange(0, REST_PADDED)[None, :]
    m_c = o_c < HEAD_DIM
    enter_late(DEPENDENT)
    p_in = qkv + i_token * qkv_stride + o_head * HEAD_DIM
    b_a = tl.load(p_in + o_a, mask=m_head & m_pair, other=0.0).to(tl.float32)
    b_b = tl.load(p_in + o_b, mask=m_head & m_pair, other=0.0).to(tl.float32)
    b_c = tl.zeros([TILE_HEADS, REST_PADDED], tl.float32)
    if REST:
        b_c = tl.load(p_in + o_c, mask=m_head & m_c, other=0.0).to(tl.float32)
    is_query = o_head < HEADS
    is_value = o_head >= HEADS + KV_HEADS
    if NORM:
        b_squares = tl.sum(b_a * b_a + b_b * b_b, axis=1)
        if REST:
            b_squares += tl.sum(b_c * b_c, axis=1)
        b_scale = tl.rsqrt(b_squares / HEAD_DIM + eps)[:, None]
        n_a, n_b, n_c = _normed(
            b_a, b_b, b_c, b_scale, is_query, q_weight, o_a, o_b, o_c, m_pair, m_c, REST
        )
        b_a, b_b, b_c = _normed(
            n_a, n_b, n_c, b_scale, (o_head >= HEADS) & (o_head < HEADS + KV_HEADS),
            k_weight, o_a, o_b, o_c, m_pair, m_c, REST,
        )  # fmt: skip
    if ROTARY:
        p_table = table + tl.load(position + i_token) * table_stride + o_pair
        b_cos = tl.load(p_table, mask=m_pair, other=0.0)
        b_sin = tl.load(p_table + HALF, mask=m_pair, other=0.0)
        r_a = tl.where(is_value, b_a, b_a * b_cos - b_b * b_sin)
        b_b = tl.where(is_value, b_b, b_b * b_cos + b_a * b_sin)
        b_a = r_a
    i_slot = i_token
    if PLACED:
        i_slot = tl.load(slot + i_token)
    o_cached = o_head - tl.where(is_value, HEADS + KV_HEADS, HEADS)
    p_out = kv + i_slot // BLOCK_TOKENS * block_stride + i_slot % BLOCK_TOKENS * HEAD_DIM
    p_out = p_out + tl.where(is_value, kind_stride, 0) + o_cached * head_stride
    dtype = qkv.dtype.element_ty
    m_cached = m_head & (o_head >= HEADS)
    tl.store(p_in + o_a, b_a.to(dtype), mask=is_query & m_pair)
    tl.store(p_in + o_b, b_b.to(dtype), mask=is_query & m_pair)
    if REST:
        tl.store(p_in + o_c, b_c.to(dtype), mask=is_query & m_c)
    if QUANTIZED:
        b_a, b_b, b_c = (
            b_a.to(dtype).to(tl.float32),
            b_b.to(dtype).to(tl.float32),
            b_c.to(dtype).to(tl.float32),
        )
        b_top = tl.maximum(_top(b_a, m_pair), _top(b_b, m_pair))
        if REST:
            b_top = tl.maximum(b_top, _top(b_c, m_c))
        b_unit = b_top / LARGEST
        b_inverse = tl.where((b_top > 1e-30) & (b_top < float("inf")), LARGEST / b_top, 0.0)
        if FIXED:
            o_fixed = o_cached + tl.where(is_value, KV_HEADS, 0)
            b_unit = tl.sum(tl.load(fixed + o_fixed, mask=m_cached, other=1.0), axis=1)
            b_inverse = tl.where(b_top < float("inf"), 1.0 / b_unit, 0.0)
        b_a = b_a * b_inverse[:, None]
        b_b = b_b * b_inverse[:, None]
        b_c = b_c * b_inverse[:, None]
        p_scale = scales + i_slot // BLOCK_TOKENS * (block_stride // 4) + i_slot % BLOCK_TOKENS
        p_scale = p_scale + BLOCK_TOKENS * HEAD_DIM // 4
        p_scale = p_scale + tl.where(is_value, kind_stride // 4, 0) + o_cached * (head_stride // 4)
        b_scale = tl.where(b_top < float("inf"), b_unit, float("nan"))
        tl.store(p_scale, b_scale[:, None], mask=m_cached)
    tl.store(
        p_out + o_a, stored(b_a, kv.dtype.element_ty, QUANTIZED, LARGEST), mask=m_cached & m_pair
    )
    tl.store(
        p_out + o_b, stored(b_b, kv.dtype.element_ty, QUANTIZED, LARGEST), mask=m_cached & m_pair
    )
    if REST:
        tl.store(
            p_out + o_c, stored(b_c, kv.dtype.element_ty, QUANTIZED, LARGEST), mask=m_cached & m_c
        )


def bind(
    problem: QKRopeWriteProblem,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    scales_2K: torch.Tensor | None = None,
) -> QKRopeWrite:
    """The kernel for one layer's heads."""
    if problem.quantized in NARROW:
        return _bind_narrow(problem, q_weight_D, k_weight_D)
    return _bind(problem, q_weight_D, k_weight_D, scales_2K)


def _bind_narrow(
    problem: QKRopeWriteProblem, q_weight_D: torch.Tensor | None, k_weight_D: torch.Tensor | None
) -> QKRopeWrite:
    """Keys and values in their own type, then as the cache keeps them."""
    form, kv_heads, head_dim = problem.quantized, problem.kv_heads, problem.head_dim
    assert form is not None
    plain = replace(problem, quantized=None, block_tokens=1)
    rotate = _bind(plain, q_weight_D, k_weight_D, None, placed=False)

    def qk_rope_write(
        qkv_TC: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        kv: torch.Tensor,
        slot_T: torch.Tensor,
    ) -> torch.Tensor:
        both = qkv_TC.new_empty(len(qkv_TC), 2, kv_heads, 1, head_dim)
        q_THD = rotate(qkv_TC, positions_T, table_PR, both, slot_T)
        write_narrow(form, both[:, 0, :, 0], both[:, 1, :, 0], kv, slot_T)
        return q_THD

    return qk_rope_write


def _bind(
    problem: QKRopeWriteProblem,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    scales_2K: torch.Tensor | None,
    *,
    placed: bool = True,
) -> QKRopeWrite:
    heads, kv_heads, head_dim = problem.heads, problem.kv_heads, problem.head_dim
    split = problem.rotary_dim or head_dim // 2 * 2
    tile_heads = max(1, min(TILE // power_of_two(head_dim), power_of_two(heads + 2 * kv_heads)))
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": problem.block_tokens,
        "ROTARY": problem.rotary_dim,
        "PAIRS": problem.layout == "pairs",
        "NORM": problem.eps is not None,
        "QUANTIZED": problem.quantized is not None,
        "FIXED": problem.fixed,
        "PLACED": placed,
        "LARGEST": LARGEST[problem.quantized] if problem.quantized else 0.0,
        "TILE_HEADS": tile_heads,
        "HALF_PADDED": power_of_two(split // 2),
        "REST_PADDED": power_of_two(head_dim - split),
        "num_warps": 4,
    }
    tiles = triton.cdiv(heads + 2 * kv_heads, tile_heads)
    eps = problem.eps or 0.0
    width = head_dim + (SCALE_BYTES if problem.quantized else 0)

    def qk_rope_write(
        qkv_TC: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        kv: torch.Tensor,
        slot_T: torch.Tensor,
    ) -> torch.Tensor:
        assert qkv_TC.stride(1) == 1 and kv.stride()[3:] == (width, 1), (kv.stride(),)
        assert positions_T.dtype == slot_T.dtype == torch.int64
        num_tokens = qkv_TC.shape[0]
        qk_rope_write_kernel[(num_tokens, tiles)](
            qkv_TC, q_weight_D, k_weight_D, positions_T, table_PR, *typed(kv, problem.quantized),
            scales_2K, slot_T, qkv_TC.stride(0), table_PR.stride(0), *kv.stride()[:3], eps, **constants,
            **launch(qkv_TC.device),
        )  # fmt: skip
        return qkv_TC.view(num_tokens, -1, head_dim)[:, :heads]

    return qk_rope_write


def _supports(problem: QKRopeWriteProblem) -> str | None:
    if problem.layout not in ("half", "pairs"):
        return f"does not know the layout {problem.layout}"
    if reason := unfit_narrow(problem.quantized, problem.head_dim, problem.block_tokens):
        return reason
    return unsupported(problem.device, problem.dtype) or unsupported_quantization(
        problem.quantized, problem.head_dim
    )


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    invariant=True,
)
