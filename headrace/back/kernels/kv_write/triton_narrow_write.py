"""Keys and values as numbers of less than a byte (quantized.py), in Triton: a program takes those
of a token's head, whose size is a power of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.kv_write.quantized import (
    E2M1,
    LEVELS,
    ROTATED,
    SCALE_BYTES,
    typed,
    value_bytes,
)
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch

NARROW = ("int4", *E2M1, *ROTATED)
"""Forms of less than a byte a value."""


@triton.jit
def _butterfly(b_x, HEAD_DIM: tl.constexpr, APART: tl.constexpr):
    """Sums and differences of values that lie so far apart."""
    b_pairs = tl.reshape(b_x, [HEAD_DIM // (2 * APART), 2, APART])
    b_first, b_second = tl.split(tl.permute(b_pairs, [0, 2, 1]))
    b_pairs = tl.permute(tl.join(b_first + b_second, b_first - b_second), [0, 2, 1])
    return tl.reshape(b_pairs, [HEAD_DIM])


@triton.jit
def _rotated(b_x, HEAD_DIM: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr):
    """Signs, then the butterflies of a Hadamard matrix, one after the other."""
    o_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    b_x = tl.where(((o_d * 0x9E3779B1) & 0xFFFFFFFF) >> 31 == 1, -b_x, b_x)
    for i in tl.static_range(LOG):
        b_x = _butterfly(b_x, HEAD_DIM, 1 << i)
    return b_x * ROOT


@triton.jit
def _nearest(b_x):
    """The nearest whole number, ties to even."""
    return (b_x + 12582912.0) - 12582912.0


@triton.jit
def normal_levels(b_number, BITS: tl.constexpr):
    """What indices of levels stand for, float32 (LEVELS)."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    b_place = tl.where(b_number < HALF, HALF - 1 - b_number, b_number - HALF)
    if BITS == 3:
        b_size = tl.where(b_place < 1, 0.24509, tl.where(b_place < 2, 0.75601, 1.34391))
        b_size = tl.where(b_place < 3, b_size, 2.15195)
    else:
        b_size = tl.where(b_place < 1, 0.1284, tl.where(b_place < 2, 0.38807, 0.65676))
        b_size = tl.where(b_place < 3, b_size, tl.where(b_place < 4, 0.94234, 1.25623))
        b_size = tl.where(b_place < 5, b_size, tl.where(b_place < 6, 1.61805, 2.06902))
        b_size = tl.where(b_place < 7, b_size, 2.73259)
    return tl.where(b_number < HALF, -b_size, b_size)


@triton.jit
def _nearest_levels(b_x, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    """Indices of levels [HEAD_DIM] (STEPS), the scale that gives them the head's norm, float16, and
    whether the head is lost."""
    squares = tl.sum(b_x * b_x, axis=0)
    root = tl.sqrt_rn(squares / HEAD_DIM).to(tl.float16).to(tl.float32)
    is_lost = (root != root) | (root == float("inf"))
    good = (root > 0.0) & (root < float("inf"))
    inverse = tl.where(good, tl.div_rn(1.0, tl.where(good, root, 1.0)), 0.0)
    b_size = tl.abs(b_x * inverse)
    if BITS == 3:
        b_place = (b_size > 0.50055).to(tl.int32) + (b_size > 1.04996).to(tl.int32)
        b_place += (b_size > 1.74793).to(tl.int32)
    else:
        b_place = (b_size > 0.258235).to(tl.int32) + (b_size > 0.522415).to(tl.int32)
        b_place += (b_size > 0.79955).to(tl.int32) + (b_size > 1.099285).to(tl.int32)
        b_place += (b_size > 1.43714).to(tl.int32) + (b_size > 1.843535).to(tl.int32)
        b_place += (b_size > 2.400805).to(tl.int32)
    HALF: tl.constexpr = 1 << (BITS - 1)
    b_number = tl.where(b_x < 0.0, HALF - 1 - b_place, HALF + b_place)
    b_level = normal_levels(b_number, BITS)
    unit = tl.sqrt_rn(tl.div_rn(squares, tl.sum(b_level * b_level, axis=0))).to(tl.float16)
    return b_number, unit, is_lost


@triton.jit
def _e4m3(b_x):
    """Bytes of the nearest e4m3 numbers of what is not negative, ties to even, and these
    numbers."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_bits = (b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) & -0x100000
    b_small = (b_x + 24576.0) - 24576.0  # steps of 2^-9
    is_small = b_x < 0.015625
    b_bytes = tl.where(is_small, (b_small * 512.0).to(tl.int32), (b_bits >> 20) - 960)
    return b_bytes, tl.where(is_small, b_small, b_bits.to(tl.float32, bitcast=True))


@triton.jit
def _e2m1(b_groups, b_wanted, outer):
    """Bits of e2m1 [G, 16] without their signs, bytes of e4m3 scales [G], the nearest to those that
    are wanted in units of `outer`, and what the numbers lose: sums of squares [G]."""
    b_bytes, b_unit = _e4m3(tl.minimum(b_wanted, 448.0))
    b_unit = b_unit * outer
    b_inverse = tl.where(b_unit > 0.0, tl.div_rn(1.0, tl.where(b_unit > 0.0, b_unit, 1.0)), 0.0)
    b_size = tl.abs(b_groups) * b_inverse[:, None]
    b_number = (b_size > 0.25).to(tl.int32) + (b_size >= 0.75).to(tl.int32)
    b_number += (b_size > 1.25).to(tl.int32) + (b_size >= 1.75).to(tl.int32)
    b_number += (b_size > 2.5).to(tl.int32) + (b_size >= 3.5).to(tl.int32)
    b_number += (b_size > 5.0).to(tl.int32)
    b_large = tl.where(b_number < 6, b_number - 2, 2 * b_number - 8).to(tl.float32)
    b_value = tl.where(b_number < 4, b_number.to(tl.float32) * 0.5, b_large)
    b_off = b_value * b_unit[:, None] - tl.abs(b_groups)
    return b_number, b_bytes, tl.sum(b_off * b_off, axis=1)


@triton.jit
def e2m1_numbers(b_x, G: tl.constexpr, LARGEST: tl.constexpr, FOURS: tl.constexpr):
    """Bits of e2m1 [G, 16] of values [16 G], bytes of e4m3 scales [G] and the scale of all
    (quantized.py); FOURS: groups end at 4 or at 6."""
    b_groups = tl.reshape(b_x, [G, 16])
    b_largest = tl.max(tl.abs(b_groups), axis=1)
    top = tl.max(b_largest, axis=0)
    outer = tl.div_rn(top, 6.0 * LARGEST)
    inverse = tl.where(top > 1e-30, tl.div_rn(LARGEST, tl.maximum(top, 1e-30)), 0.0)
    b_number, b_bytes, b_off = _e2m1(b_groups, b_largest * inverse, outer)
    if FOURS:
        b_fours, b_of_fours, b_off_fours = _e2m1(b_groups, b_largest * inverse * 1.5, outer)
        b_fewer = b_off_fours < b_off
        b_number = tl.where(b_fewer[:, None], b_fours, b_number)
        b_bytes = tl.where(b_fewer, b_of_fours, b_bytes)
    return b_number | ((b_groups < 0.0).to(tl.int32) << 3), b_bytes, outer


@triton.jit
def narrow_write_kernel(
    k, v, kv, scales, slots, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    block_stride, kind_stride, head_stride, FORM: tl.constexpr, HEAD_DIM: tl.constexpr,
    LOG: tl.constexpr, ROOT: tl.constexpr, MOST: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, LARGEST: tl.constexpr, LEVEL_BITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, KV heads, keys and values. `kv` int8, `scales` the same memory as float32;
    strides of the cache count bytes. MOST: the largest whole number, BYTES: of a token's values,
    LARGEST: of forms of e2m1 numbers the scale of the largest, else 0. LEVEL_BITS: of indices,
    else 0."""
    enter(DEPENDENT)
    i_t, i_k, i_kind = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1).to(tl.int64),
        tl.program_id(2),
    )
    o_d = tl.arange(0, HEAD_DIM)
    if i_kind == 0:
        b_x = tl.load(k + i_t * k_token_stride + i_k * k_head_stride + o_d).to(tl.float32)
    else:
        b_x = tl.load(v + i_t * v_token_stride + i_k * v_head_stride + o_d).to(tl.float32)
    b_size = tl.abs(b_x)
    b_size = tl.where(b_size == b_size, b_size, float("inf"))
    is_lost = tl.max(b_size, axis=0) == float("inf")
    b_x = tl.where(is_lost, 0.0, b_x)
    slot = tl.load(slots + i_t)
    place = slot % BLOCK_TOKENS
    offset = slot // BLOCK_TOKENS * block_stride + i_k * head_stride + i_kind * kind_stride
    p_values = kv + offset + place * BYTES
    if LARGEST > 0.0:
        G: tl.constexpr = HEAD_DIM // 16
        b_number, b_bytes, b_slot = e2m1_numbers(b_x, G, LARGEST, FORM == "nvfp4-4over6")
        b_number = tl.reshape(b_number, [HEAD_DIM])
        tl.store(p_values + HEAD_DIM // 2 + tl.arange(0, G), b_bytes.to(tl.int8))
    elif LEVEL_BITS > 0:
        b_x = _rotated(b_x, HEAD_DIM, LOG, ROOT)
        b_number, unit, is_beyond = _nearest_levels(b_x, HEAD_DIM, LEVEL_BITS)
        is_lost = is_lost | is_beyond
        b_number = tl.where(is_lost, 0, b_number)
        b_slot = (unit.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF).to(
            tl.float32, bitcast=True
        )
    else:
        if LOG:
            b_x = _rotated(b_x, HEAD_DIM, LOG, ROOT)
        low = tl.min(b_x, axis=0)
        unit = tl.div_rn(tl.max(b_x, axis=0) - low, MOST).to(tl.float16)
        base = low.to(tl.float16)
        u_unit, u_base = unit.to(tl.float32), base.to(tl.float32)
        is_lost = is_lost | (tl.abs(u_unit) == float("inf")) | (tl.abs(u_base) == float("inf"))
        is_lost = is_lost | (u_unit != u_unit)
        u_unit, u_base = tl.where(is_lost, 0.0, u_unit), tl.where(is_lost, 0.0, u_base)
        inverse = tl.where(u_unit > 0.0, tl.div_rn(1.0, tl.where(u_unit > 0.0, u_unit, 1.0)), 0.0)
        b_number = _nearest(tl.minimum(tl.maximum((b_x - u_base) * inverse, 0.0), MOST))
        b_number = tl.where(is_lost, 0, b_number.to(tl.int32))
        low_half = unit.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high_half = base.to(tl.int16, bitcast=True).to(tl.int32) << 16
        b_slot = (low_half | high_half).to(tl.float32, bitcast=True)
    if FORM == "int3-rotated" or FORM == "turboquant-3bit":
        QUARTER: tl.constexpr = HEAD_DIM // 4
        EIGHTH: tl.constexpr = HEAD_DIM // 8
        o_4, o_8 = tl.arange(0, 4)[:, None], tl.arange(0, 8)[:, None]
        b_low = tl.sum(tl.reshape(b_number & 3, [4, QUARTER]) << (2 * o_4), axis=0)
        b_high = tl.sum(tl.reshape(b_number >> 2, [8, EIGHTH]) << o_8, axis=0)
        tl.store(p_values + tl.arange(0, QUARTER), b_low.to(tl.int8))
        tl.store(p_values + QUARTER + tl.arange(0, EIGHTH), b_high.to(tl.int8))
    else:
        HALF: tl.constexpr = HEAD_DIM // 2
        o_2 = tl.arange(0, 2)[:, None]
        b_both = tl.sum(tl.reshape(b_number, [2, HALF]) << (4 * o_2), axis=0)
        tl.store(p_values + tl.arange(0, HALF), b_both.to(tl.int8))
    p_scale = scales + offset // 4 + BLOCK_TOKENS * BYTES // 4 + place
    tl.store(p_scale, tl.where(is_lost, float("nan"), b_slot))


def unfit_narrow(form: str | None, head_dim: int, block_tokens: int) -> str | None:
    """Why the kernel cannot write heads of a size."""
    if form not in NARROW:
        return None
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"{form}: heads whose size is a power of two from 16 on, not {head_dim}"
    if value_bytes(head_dim, form) * block_tokens % SCALE_BYTES:
        return f"{form}: blocks of a multiple of 4 tokens, not {block_tokens}"
    return None


def write(
    form: str, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """Launches it."""
    num_tokens, kv_heads, head_dim = k_TKD.shape
    block_tokens, width = kv.shape[3:]
    bytes_of_one = value_bytes(head_dim, form)
    assert width == bytes_of_one + SCALE_BYTES and kv.dtype == torch.int8, (kv.shape, kv.dtype)
    assert kv.stride()[3:] == (width, 1) and v_TKD.shape == k_TKD.shape, kv.stride()
    assert k_TKD.stride(2) == v_TKD.stride(2) == 1, (k_TKD.stride(), v_TKD.stride())
    if not num_tokens:
        return
    narrow_write_kernel[(num_tokens, kv_heads, 2)](
        k_TKD, v_TKD, *typed(kv, form), slot_T.contiguous(), *k_TKD.stride()[:2],
        *v_TKD.stride()[:2], *kv.stride()[:3], FORM=form, HEAD_DIM=head_dim,
        LOG=head_dim.bit_length() - 1 if form in ROTATED else 0, ROOT=float(head_dim**-0.5),
        MOST=float(ROTATED.get(form, 15)), BYTES=bytes_of_one, BLOCK_TOKENS=block_tokens,
        LARGEST=E2M1.get(form, 0.0), LEVEL_BITS=len(LEVELS.get(form, ())).bit_length(),
        num_warps=1, enable_fp_fusion=False, **launch(k_TKD.device),
    )  # fmt: skip
