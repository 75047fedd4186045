"""Norm, rotation and write of latents in one Triton kernel: a program takes one query head of a
token, or, behind the last head, its latent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.latent_write.op import LatentWrite, LatentWriteProblem, check_operands
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported


@triton.jit
def _rotate(p_x, p_to, b_cos, b_sin, o_f, m_f, ROTARY: tl.constexpr, PAIRS: tl.constexpr):
    """to = x rotated."""
    STEP: tl.constexpr = 2 if PAIRS else 1
    APART: tl.constexpr = 1 if PAIRS else ROTARY // 2
    b_a = tl.load(p_x + o_f * STEP, mask=m_f, other=0.0).to(tl.float32)
    b_b = tl.load(p_x + o_f * STEP + APART, mask=m_f, other=0.0).to(tl.float32)
    dtype = p_to.dtype.element_ty
    tl.store(p_to + o_f * STEP, (b_a * b_cos - b_b * b_sin).to(dtype), mask=m_f)
    tl.store(p_to + o_f * STEP + APART, (b_b * b_cos + b_a * b_sin).to(dtype), mask=m_f)


@triton.jit
def latent_write_kernel(
    q, latent, position, table, kv, slot, out, weight, eps, q_token_stride, q_head_stride,
    latent_stride, block_stride, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr,
    C: tl.constexpr, ROTARY: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, heads + 1."""
    enter_late(DEPENDENT)
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_f = tl.arange(0, F)
    m_f = o_f < ROTARY // 2
    p_angles = table + tl.load(position + i_t) * ROTARY + o_f
    b_cos = tl.load(p_angles, mask=m_f, other=0.0)
    b_sin = tl.load(p_angles + ROTARY // 2, mask=m_f, other=0.0)
    WIDTH: tl.constexpr = RANK + ROTARY
    if i_h < HEADS:
        p_q = q + i_t * q_token_stride + i_h * q_head_stride + NOPE
        p_out = out + (i_t * HEADS + i_h) * WIDTH + RANK
        _rotate(p_q, p_out, b_cos, b_sin, o_f, m_f, ROTARY, PAIRS)
    else:
        o_c = tl.arange(0, C)
        m_c = o_c < RANK
        p_latent = latent + i_t * latent_stride
        b_slot = tl.load(slot + i_t)
        p_kv = kv + b_slot // BLOCK_TOKENS * block_stride + b_slot % BLOCK_TOKENS * WIDTH
        b_x = tl.load(p_latent + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / RANK + eps)
        b_y = b_x * b_scale * tl.load(weight + o_c, mask=m_c, other=0.0)
        tl.store(p_kv + o_c, b_y.to(kv.dtype.element_ty), mask=m_c)
        _rotate(p_latent + RANK, p_kv + RANK, b_cos, b_sin, o_f, m_f, ROTARY, PAIRS)


def bind(problem: LatentWriteProblem, weight_C: torch.Tensor) -> LatentWrite:
    """The kernel for one layer; keeps the weight."""
    weight_C = weight_C.float().contiguous()
    constants = {
        "HEADS": problem.heads, "NOPE": problem.nope, "RANK": problem.rank,
        "C": power_of_two(problem.rank), "ROTARY": problem.rotary,
        "F": power_of_two(problem.rotary // 2), "PAIRS": problem.layout == "pairs",
        "BLOCK_TOKENS": problem.block_tokens,
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
        latent_write_kernel[(q_THD.shape[0], problem.heads + 1)](
            q_THD, latent_TW, positions_T, table_PR, kv, slot_T, q_THW, weight_C, problem.eps,
            *q_THD.stride()[:2], latent_TW.stride(0), kv.stride(0), num_warps=1, **constants,
            **launch(q_THD.device),
        )  # fmt: skip

    return latent_write


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
