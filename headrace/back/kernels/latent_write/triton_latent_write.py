"""Norm, rotation and write of latents in one Triton kernel: a program takes a token, all heads of
its query and its latent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.kv_write.quantized import E2M1, LARGEST
from headrace.back.kernels.kv_write.triton_narrow_write import e2m1_numbers
from headrace.back.kernels.latent_write.op import LatentWrite, LatentWriteProblem, check_operands
from headrace.back.kernels.latent_write.quantized import typed
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.qk_rope_write.triton_qk_rope_write import stored
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import (
    launch,
    power_of_two,
    unsupported,
    unsupported_quantization,
)


@triton.jit
def _rotate(
    p_x, p_to, m_x, b_cos, b_sin, F: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr
):
    """to = x rotated, of rows [N, 1] that there are, angles [1, F]."""
    N: tl.constexpr = p_x.shape[0]
    HALF: tl.constexpr = ROTARY // 2
    dtype = p_to.dtype.element_ty
    if PAIRS:  # neighbours come and go together, in wide accesses
        o_r = tl.arange(0, 2 * F)[None, :]
        m_r = m_x & (o_r < ROTARY)
        b_x = tl.load(p_x + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_a, b_b = tl.split(tl.reshape(b_x, [N, F, 2]))
        b_y = tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin)
        tl.store(p_to + o_r, tl.reshape(b_y, [N, 2 * F]).to(dtype), mask=m_r)
    else:
        o_f = tl.arange(0, F)[None, :]
        m_f = m_x & (o_f < HALF)
        b_a = tl.load(p_x + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_b = tl.load(p_x + HALF + o_f, mask=m_f, other=0.0).to(tl.float32)
        tl.store(p_to + o_f, (b_a * b_cos - b_b * b_sin).to(dtype), mask=m_f)
        tl.store(p_to + HALF + o_f, (b_b * b_cos + b_a * b_sin).to(dtype), mask=m_f)


@triton.jit
def _scale_of(b_top, LARGEST: tl.constexpr):
    """A scale for numbers up to b_top, and what they are multiplied with to be stored. Inf: one is
    lost."""
    there = b_top < float("inf")
    b_inverse = tl.where((b_top > 1e-30) & there, LARGEST / b_top, 0.0)
    return tl.where(there, b_top / LARGEST, float("nan")), b_inverse


@triton.jit
def _size(b_x):
    """Magnitudes; inf of what is no number."""
    b_size = tl.abs(b_x)
    return tl.where(b_size == b_size, b_size, float("inf"))


@triton.jit
def _quantize_rotated(
    p_x, p_to, p_scale, b_cos, b_sin, F: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """As `_rotate`, of one row, with a scale."""
    HALF: tl.constexpr = ROTARY // 2
    o_f = tl.arange(0, F)
    m_f = o_f < HALF
    o_a = 2 * o_f if PAIRS else o_f
    o_b = 2 * o_f + 1 if PAIRS else HALF + o_f
    dtype = p_x.dtype.element_ty
    b_a = tl.load(p_x + o_a, mask=m_f, other=0.0).to(tl.float32)
    b_b = tl.load(p_x + o_b, mask=m_f, other=0.0).to(tl.float32)
    b_turned = (b_a * b_cos - b_b * b_sin).to(dtype).to(tl.float32)
    b_other = (b_b * b_cos + b_a * b_sin).to(dtype).to(tl.float32)
    top = tl.max(tl.maximum(_size(b_turned), _size(b_other)), axis=0)
    b_scale, b_inverse = _scale_of(top, LARGEST)
    kept = p_to.dtype.element_ty
    tl.store(p_to + o_a, stored(b_turned * b_inverse, kept, True, LARGEST), mask=m_f)
    tl.store(p_to + o_b, stored(b_other * b_inverse, kept, True, LARGEST), mask=m_f)
    tl.store(p_scale, b_scale)


@triton.jit
def _write_e2m1(p_kv, b_y, C: tl.constexpr, LARGEST: tl.constexpr, FOURS: tl.constexpr):
    """Numbers of a latent whose size is a power of two and the scales of its groups; the scale of
    all."""
    p_kv = p_kv.to(tl.pointer_type(tl.uint8), bitcast=True)
    b_number, b_bytes, b_unit = e2m1_numbers(b_y, C // 16, LARGEST, FOURS)
    b_shift = 4 * tl.arange(0, 2)[:, None]
    b_both = tl.sum(tl.reshape(b_number, [2, C // 2]) << b_shift, axis=0)
    tl.store(p_kv + tl.arange(0, C // 2), b_both.to(tl.uint8))
    tl.store(p_kv + C // 2 + tl.arange(0, C // 16), b_bytes.to(tl.uint8))
    return b_unit


@triton.jit
def latent_write_kernel(
    q, latent, position, table, kv, scales, slot, out, weight, eps, q_token_stride, q_head_stride,
    latent_stride, block_stride, HEADS: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, C: tl.constexpr, ROTARY: tl.constexpr, F: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr, E2M1: tl.constexpr, FOURS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. H: HEADS, C: RANK, F: ROTARY / 2, padded. LARGEST: of a quantized byte; E2M1:
    of e2m1 numbers the e4m3 scale of the largest, else 0."""
    enter_late(DEPENDENT)
    i_t = tl.program_id(0).to(tl.int64)
    o_f = tl.arange(0, F)
    o_h = tl.arange(0, H)
    o_c = tl.arange(0, C)
    m_f, m_c = o_f < ROTARY // 2, o_c < RANK
    WIDTH: tl.constexpr = RANK + ROTARY
    OWN: tl.constexpr = RANK // 2 + RANK // 16 if E2M1 > 0.0 else RANK
    p_latent = latent + i_t * latent_stride
    b_x = tl.load(p_latent + o_c, mask=m_c, other=0.0).to(tl.float32)
    p_angles = table + tl.load(position + i_t) * ROTARY + o_f
    b_cosines = tl.load(p_angles, mask=m_f, other=0.0)
    b_sines = tl.load(p_angles + ROTARY // 2, mask=m_f, other=0.0)
    b_cos, b_sin = b_cosines[None, :], b_sines[None, :]
    p_q = q + i_t * q_token_stride + o_h[:, None] * q_head_stride + NOPE
    p_out = out + (i_t * HEADS + o_h[:, None]) * WIDTH + RANK
    _rotate(p_q, p_out, (o_h < HEADS)[:, None], b_cos, b_sin, F, ROTARY, PAIRS)
    b_slot = tl.load(slot + i_t)
    p_kv = kv + b_slot // BLOCK_TOKENS * block_stride + b_slot % BLOCK_TOKENS * (OWN + ROTARY)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / RANK + eps)
    b_y = b_x * b_scale * tl.load(weight + o_c, mask=m_c, other=0.0)
    if QUANTIZED:
        b_y = b_y.to(latent.dtype.element_ty).to(tl.float32)
        top = tl.max(_size(b_y), axis=0)
        if E2M1 > 0.0:
            b_y = tl.where(top < float("inf"), b_y, 0.0)
            b_unit = _write_e2m1(p_kv, b_y, C, E2M1, FOURS)
            b_unit = tl.where(top < float("inf"), b_unit, float("nan"))
        else:
            b_unit, b_inverse = _scale_of(top, LARGEST)
            b_kept = stored(b_y * b_inverse, kv.dtype.element_ty, True, LARGEST)
            tl.store(p_kv + o_c, b_kept, mask=m_c)
        p_scale = scales + b_slot // BLOCK_TOKENS * (block_stride // 4)
        p_scale = p_scale + BLOCK_TOKENS * (OWN + ROTARY) // 4 + b_slot % BLOCK_TOKENS * 2
        tl.store(p_scale, b_unit)
        _quantize_rotated(
            p_latent + RANK, p_kv + OWN, p_scale + 1, b_cosines, b_sines, F, ROTARY, PAIRS, LARGEST
        )
        return
    tl.store(p_kv + o_c, b_y.to(kv.dtype.element_ty), mask=m_c)
    o_one = tl.arange(0, 1)[:, None]
    p_rotary = p_latent + RANK + o_one
    _rotate(p_rotary, p_kv + RANK + o_one, o_one == 0, b_cos, b_sin, F, ROTARY, PAIRS)


def bind(problem: LatentWriteProblem, weight_C: torch.Tensor) -> LatentWrite:
    """The kernel for one layer; keeps the weight."""
    weight_C = weight_C.float().contiguous()
    constants = {
        "HEADS": problem.heads, "H": power_of_two(problem.heads), "NOPE": problem.nope,
        "RANK": problem.rank,
        "C": power_of_two(problem.rank), "ROTARY": problem.rotary,
        "F": power_of_two(problem.rotary // 2), "PAIRS": problem.layout == "pairs",
        "BLOCK_TOKENS": problem.block_tokens, "QUANTIZED": problem.quantized is not None,
        "LARGEST": LARGEST.get(problem.quantized or "", LARGEST["fp8"]),
        "E2M1": E2M1.get(problem.quantized or "", 0.0),
        "FOURS": problem.quantized == "nvfp4-4over6",
    }  # fmt: skip

    def latent_write(
        q_THD: torch.Tensor,
        latent_TW: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        kv: torch.Tensor,
        slot_T: torch.Tensor,
        q_THW: torch.Tensor,
    ) -> None:
        check_operands(problem, q_THD, latent_TW, kv, q_THW)
        latent_write_kernel[(q_THD.shape[0],)](
            q_THD, latent_TW, positions_T, table_PR, *typed(kv, problem.quantized), slot_T, q_THW,
            weight_C, problem.eps, *q_THD.stride()[:2], latent_TW.stride(0), kv.stride(0), num_warps=2, **constants,
            **launch(q_THD.device),
        )  # fmt: skip

    return latent_write


def unsupported_form(form: str | None, rank: int) -> str | None:
    """Why kernels cannot have latents in a form: beside e2m1 numbers lie e4m3 ones."""
    reason = unsupported_quantization(form, rank)
    return reason or (unsupported_quantization("fp8", rank) if form in E2M1 else None)


def _supports(problem: LatentWriteProblem) -> str | None:
    reason = unsupported(problem.device, problem.dtype)
    return reason or unsupported_form(problem.quantized, problem.rank)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
