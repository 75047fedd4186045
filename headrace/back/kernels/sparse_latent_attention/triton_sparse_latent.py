"""Attention over chosen positions of a cache of latents in Triton: a program takes a token and some
of its heads, and reads the chosen latents in their order.

Two kernels of the op are made of it. One cuts no list and takes sixteen heads, so that a query's
bits are the same in any step. The other cuts the lists of few tokens into parts, whose results a
second kernel puts together, and of many tokens takes more heads at once, which read a latent
together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.attention.triton_softmax import softmax_weights
from headrace.back.kernels.latent_attention.triton_latent import (
    form_number,
    latent_tiles,
    stored_width,
)
from headrace.back.kernels.latent_write.quantized import typed
from headrace.back.kernels.latent_write.triton_latent_write import unsupported_form
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sparse_latent_attention.op import (
    SparseLatentAttentionFunction,
    SparseLatentProblem,
)
from headrace.back.kernels.triton.grid import enter_late
from headrace.back.kernels.triton.room import LARGEST, shared_bytes
from headrace.back.kernels.triton.wrap import (
    launch,
    power_of_two,
    unsupported,
)


@dataclass(frozen=True, kw_only=True)
class SparseTiles:
    """Heads and positions of a tile, as few as a dot takes; `part`: positions of a part of a list,
    0: lists are not cut."""

    heads: int = 16
    positions: int = 32
    num_warps: int = 4
    num_stages: int = 2
    part: int = 0


TILES = SparseTiles()
MANY = SparseTiles(heads=64, positions=64, num_warps=8)
PART = 128
FEW = {
    1: SparseTiles(positions=64, part=PART),
    2: SparseTiles(heads=64, num_warps=8, part=PART),
    4: SparseTiles(heads=64, num_warps=8, part=PART),
    8: SparseTiles(heads=64, num_warps=8, part=2 * PART),
}
"""Up to so many tokens, whose lists are cut. On an H200 128 heads over 2,048 positions took 19.9 us
for one token and 58.6 for eight; tiles of 16 heads and of one size of parts 65.8 or more. 2,048
tokens ran at 226 TFLOP/s with MANY, at 179 with half the positions."""


@triton.jit
def row_of(start, rows, i_t):
    """The last row that begins at or before the token."""
    b_count = 0
    for first in range(0, rows + 1, 128):
        o_r = first + tl.arange(0, 128)
        b_start = tl.load(start + o_r, mask=o_r <= rows, other=2147483647)
        b_count += tl.sum((b_start <= i_t).to(tl.int32), axis=0)
    return b_count - 1


@triton.jit
def sparse_latent_attention_kernel(
    q, kv, scales, start, table, chosen, out, partial, sinks, rows, table_stride, block_stride,
    scale,
    HEADS: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, C: tl.constexpr,
    ROTARY: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, S: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SINKS: tl.constexpr, QUANTIZED: tl.constexpr,
    PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of H heads, parts of PART positions. C: RANK, R: ROTARY, padded. `scale`:
    in base 2. With several parts, partial [tokens, parts, HEADS, C + 2] is written: sums, the
    maximum and the total."""
    enter_late(DEPENDENT)
    i_p, parts = tl.program_id(2), tl.num_programs(2)
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = RANK + ROTARY
    dtype = q.dtype.element_ty
    o_h = i_h * H + tl.arange(0, H)
    o_c, o_r, o_s = tl.arange(0, C), tl.arange(0, R), tl.arange(0, S)
    m_h, m_c, m_r = (o_h < HEADS)[:, None], (o_c < RANK)[None, :], (o_r < ROTARY)[None, :]
    p_q = q + (i_t.to(tl.int64) * HEADS + o_h[:, None]) * WIDTH
    b_q = tl.load(p_q + o_c[None, :], mask=m_h & m_c, other=0.0)
    b_qr = tl.load(p_q + RANK + o_r[None, :], mask=m_h & m_r, other=0.0)
    p_blocks = table + tl.minimum(row_of(start, rows, i_t), rows - 1).to(tl.int64) * table_stride
    p_chosen = chosen + i_t.to(tl.int64) * TOP_K
    b_best = tl.full([H], float("-inf"), tl.float32)
    b_total = tl.zeros([H], tl.float32)
    if SINKS:
        b_sink = tl.load(sinks + o_h, mask=o_h < HEADS, other=0.0) * 1.4426950408889634
        b_best = tl.where(i_p == 0, b_sink, b_best)
        b_total = tl.where(i_p == 0, 1.0, b_total)
    b_out = tl.zeros([H, C], tl.float32)
    is_padding = i_t >= tl.load(start + rows)
    until = tl.where(is_padding, 0, tl.minimum(i_p * PART + PART, TOP_K))
    for first in range(i_p * PART, until, S):
        m_list = first + o_s < until
        b_at = tl.load(p_chosen + first + o_s, mask=m_list, other=-1)
        m_s = b_at >= 0
        b_at = tl.maximum(b_at, 0)
        b_block = tl.load(p_blocks + b_at // BLOCK_TOKENS, mask=m_s, other=0).to(tl.int64)
        b_kv, b_kvr = latent_tiles(
            kv, scales, b_block, b_at, m_s, block_stride, dtype, BLOCK_TOKENS, RANK, C, ROTARY, R,
            QUANTIZED,
        )  # fmt: skip
        b_scores = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee")
        b_scores += tl.dot(b_qr, tl.trans(b_kvr), input_precision="ieee")
        b_scores = tl.where(m_s[None, :], b_scores * scale, float("-inf"))
        b_p, b_old, b_best = softmax_weights(b_scores, b_best, 1.0, True)
        b_total = b_total * b_old + tl.sum(b_p, axis=1)
        b_out = b_out * b_old[:, None]
        b_out += tl.dot(b_p.to(dtype), b_kv, input_precision="ieee")
    if PART < TOP_K:
        i_own = (i_t.to(tl.int64) * parts + i_p) * HEADS
        p_own = partial + (i_own + o_h) * (C + 2)
        tl.store(p_own[:, None] + o_c[None, :], b_out, mask=m_h)
        tl.store(p_own + C, b_best, mask=o_h < HEADS)
        tl.store(p_own + C + 1, b_total, mask=o_h < HEADS)
        return
    b_out = b_out / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    p_out = out + (i_t.to(tl.int64) * HEADS + o_h[:, None]) * RANK + o_c[None, :]
    tl.store(p_out, b_out.to(dtype), mask=m_h & m_c)


@triton.jit
def sparse_merge_kernel(
    partial, out, HEADS: tl.constexpr, RANK: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    P: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, heads. P: PARTS, padded."""
    enter_late(DEPENDENT)
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    o_p, o_c = tl.arange(0, P), tl.arange(0, C)
    p_own = partial + ((i_t.to(tl.int64) * PARTS + o_p) * HEADS + i_h) * (C + 2)
    m_p = o_p < PARTS
    b_best = tl.load(p_own + C, mask=m_p, other=float("-inf"))
    best = tl.max(b_best, axis=0)
    b_share = tl.exp2(b_best - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(b_share * tl.load(p_own + C + 1, mask=m_p, other=0.0), axis=0)
    b_out = tl.load(p_own[:, None] + o_c[None, :], mask=m_p[:, None], other=0.0)
    b_out = tl.sum(b_out * b_share[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    p_out = out + (i_t.to(tl.int64) * HEADS + i_h) * RANK + o_c
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=o_c < RANK)


def bind(
    problem: SparseLatentProblem,
    sinks_H: torch.Tensor | None = None,
    tiles: SparseTiles = TILES,
) -> SparseLatentAttentionFunction:
    """The kernels of one shape and size of tiles; keeps the sinks."""
    assert problem.sinks == (sinks_H is not None), problem
    heads, rank, rotary = problem.heads, problem.rank, problem.rotary
    part = min(tiles.part or problem.top_k, problem.top_k)
    parts, depth = triton.cdiv(problem.top_k, part), max(16, power_of_two(rank))
    constants = {
        "HEADS": heads, "H": tiles.heads, "RANK": rank, "C": depth, "ROTARY": rotary,
        "R": max(16, power_of_two(rotary)), "TOP_K": problem.top_k, "S": tiles.positions,
        "BLOCK_TOKENS": problem.block_tokens, "SINKS": problem.sinks, "PART": part,
        "QUANTIZED": form_number(problem.quantized),
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    scale = problem.scale * 1.4426950408889634
    stored = stored_width(rank, rotary, problem.quantized)

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TK: torch.Tensor
    ) -> torch.Tensor:
        assert q_THW.is_contiguous() and q_THW.shape[1:] == (heads, rank + rotary), q_THW.shape
        assert kv.stride()[1:] == (stored, 1), kv.stride()
        assert chosen_TK.shape == (len(q_THW), problem.top_k) and chosen_TK.is_contiguous()
        num_tokens, device = len(q_THW), q_THW.device
        out_THC = q_THW.new_empty((num_tokens, heads, rank))
        size = num_tokens * parts * heads * (depth + 2) if parts > 1 else 0
        partial = torch.empty(size, dtype=torch.float32, device=device)
        sparse_latent_attention_kernel[(num_tokens, -(-heads // tiles.heads), parts)](
            q_THW, *typed(kv, problem.quantized), plan.query_start_R1, plan.block_table_RB,
            chosen_TK, out_THC, partial,
            q_THW if sinks_H is None else sinks_H, plan.kv_len_R.shape[0],
            plan.block_table_RB.stride(0), kv.stride(0), scale, **constants, **launch(device),
        )  # fmt: skip
        if parts > 1:
            sparse_merge_kernel[(num_tokens, heads)](
                partial, out_THC, HEADS=heads, RANK=rank, C=depth, PARTS=parts,
                P=power_of_two(parts), num_warps=4, **launch(device),
            )  # fmt: skip
        return out_THC

    return attention


def bind_by_steps(
    problem: SparseLatentProblem, sinks_H: torch.Tensor | None = None
) -> SparseLatentAttentionFunction:
    """The same with tiles by the number of a step's tokens."""
    few = {tokens: bind(problem, sinks_H, _fit(problem, tiles)) for tokens, tiles in FEW.items()}
    many = bind(problem, sinks_H, _fit(problem, MANY))

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, chosen_TK: torch.Tensor
    ) -> torch.Tensor:
        attend = few.get(power_of_two(len(q_THW)), many)
        return attend(q_THW, kv, plan, chosen_TK)

    return attention


def _fit(problem: SparseLatentProblem, tiles: SparseTiles) -> SparseTiles:
    """With no more heads than there are."""
    heads = min(tiles.heads, max(TILES.heads, power_of_two(problem.heads)))
    return tiles if heads == tiles.heads else replace(TILES, heads=heads, part=tiles.part)


def _supports(problem: SparseLatentProblem) -> str | None:
    reason = unsupported(problem.device, problem.dtype)
    return reason or unsupported_form(problem.quantized, problem.rank)


def _supports_steps(problem: SparseLatentProblem) -> str | None:
    if problem.dtype is torch.float32:
        return "takes tiles that float32 does not fit"
    if problem.rank > 512:
        return f"latents of {problem.rank} are above 512"
    if shared_bytes() < LARGEST:
        return "takes tiles that do not fit this device's shared memory"
    return _supports(problem)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
BY_STEPS = Kernel(name="triton by steps", supports=_supports_steps, bind=bind_by_steps)
