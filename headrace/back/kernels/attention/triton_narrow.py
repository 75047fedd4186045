"""How the attention kernels of Triton read a cache of less than a byte a value
(kernels/kv_write/quantized.py): numbers are taken out of their bytes and become values of the
model's dtype, in the order of a head's dimensions.

Heads of rotated forms are met by queries that are rotated alike, and what is summed of them is
turned back at the end: one product with a matrix each, outside the kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.kv_write.quantized import (
    E2M1,
    ROTATED,
    SCALE_BYTES,
    rotation,
    value_bytes,
)
from headrace.back.kernels.kv_write.triton_narrow_write import NARROW, normal_levels
from headrace.back.kernels.triton.wrap import has_bfloat_pairs


def token_width(problem: AttentionProblem) -> int:
    """Elements of a token's key or value of one head, the bytes of its scale included."""
    if problem.quantized is None:
        return problem.head_dim
    return value_bytes(problem.head_dim, problem.quantized) + SCALE_BYTES


def forms_of(problem: AttentionProblem) -> dict[str, Any]:
    """What kernels are compiled for: bytes with scales (BITS: by triton_quantized.py's sequences),
    or a form of less than a byte."""
    form = problem.quantized
    by_bits = form in ("int8", "fp8") and problem.dtype is torch.bfloat16 and has_bfloat_pairs()
    narrow = form in NARROW
    return {
        "QUANTIZED": form is not None and not narrow,
        "BITS": by_bits,
        "NARROW": ("nvfp4" if form in E2M1 else form) if narrow else None,
    }


@triton.jit
def narrow_pointers(
    p_head, scales, b_block, i_head, o_n, block_stride, head_stride, BLOCK_TOKENS: tl.constexpr,
    FORM: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Where the bytes and the scales of the tokens at positions `o_n` begin; strides count
    bytes."""
    if FORM == "int3-rotated" or FORM == "turboquant-3bit":
        BYTES: tl.constexpr = HEAD_DIM // 8 * 3
    elif FORM == "nvfp4":
        BYTES: tl.constexpr = HEAD_DIM // 2 + HEAD_DIM // 16
    else:
        BYTES: tl.constexpr = HEAD_DIM // 2
    p_values = p_head + b_block * block_stride + o_n % BLOCK_TOKENS * BYTES
    p_scale = scales + i_head.to(tl.int64) * (head_stride // 4) + b_block * (block_stride // 4)
    return p_values, p_scale + BLOCK_TOKENS * BYTES // 4 + o_n % BLOCK_TOKENS


@triton.jit
def _e4m3(b_bits):
    """The numbers of bytes that are not negative."""
    b_normal = ((b_bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(b_bits < 8, b_bits.to(tl.float32) * 0.001953125, b_normal)


@triton.jit
def narrow_values(
    p_values, p_scale, m_n, dtype: tl.constexpr, FORM: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """[N, HEAD_DIM] of the tokens whose bytes and scales are at these pointers [N]; zeros where
    `m_n` is false."""
    o_d = tl.arange(0, HEAD_DIM)[None, :]
    m_kv = m_n[:, None] & (o_d >= 0)
    p_token = p_values[:, None]
    b_slot = tl.load(p_scale, mask=m_n, other=0.0)
    if FORM == "int3-rotated" or FORM == "turboquant-3bit":
        QUARTER: tl.constexpr = HEAD_DIM // 4
        EIGHTH: tl.constexpr = HEAD_DIM // 8
        b_low = tl.load(p_token + o_d % QUARTER, mask=m_kv, other=0).to(tl.int32)
        b_high = tl.load(p_token + QUARTER + o_d % EIGHTH, mask=m_kv, other=0).to(tl.int32)
        b_number = ((b_low >> (o_d // QUARTER * 2)) & 3) | (((b_high >> (o_d // EIGHTH)) & 1) << 2)
    else:
        HALF: tl.constexpr = HEAD_DIM // 2
        b_byte = tl.load(p_token + o_d % HALF, mask=m_kv, other=0).to(tl.int32)
        b_number = (b_byte >> (o_d // HALF * 4)) & 15
    if FORM == "nvfp4":
        p_group = p_token + HEAD_DIM // 2 + o_d // 16
        b_group = tl.load(p_group, mask=m_kv, other=0).to(tl.int32) & 255
        b_size = b_number & 7
        b_large = tl.where(b_size < 6, b_size - 2, 2 * b_size - 8).to(tl.float32)
        b_value = tl.where(b_size < 4, b_size.to(tl.float32) * 0.5, b_large)
        b_value = tl.where(b_number < 8, b_value, -b_value)
        b_value = b_value * (_e4m3(b_group) * b_slot[:, None])
    else:
        b_bits = b_slot.to(tl.int32, bitcast=True)
        b_unit = (b_bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_least = (b_bits >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if FORM == "turboquant-4bit" or FORM == "turboquant-3bit":
            b_number = normal_levels(b_number, 3 if FORM == "turboquant-3bit" else 4)
        b_value = b_number.to(tl.float32) * b_unit[:, None] + b_least[:, None]
    return b_value.to(dtype)


@cache
def _matrix(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return rotation(head_dim).to(device, dtype)


class Turned:
    """Queries turned as the heads of a cache are, and results turned back; of forms that do not
    rotate as they are."""

    def __init__(self, form: str | None, head_dim: int, dtype: torch.dtype) -> None:
        self._rotates = form in ROTATED
        self._head_dim, self._dtype = head_dim, dtype

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """q that meets rotated keys."""
        if not self._rotates:
            return q_THD
        return torch.matmul(q_THD, _matrix(self._head_dim, self._dtype, q_THD.device))

    def results(self, out_THD: torch.Tensor) -> torch.Tensor:
        """Sums of rotated values."""
        if not self._rotates:
            return out_THD
        return torch.matmul(out_THD, _matrix(self._head_dim, self._dtype, out_THD.device).t())
