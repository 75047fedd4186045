"""Attention over latents in Triton, with results that do not depend on the step: the positions are
cut at multiples of SPLIT_TOKENS and merged in order, as in kernels/attention/triton_fixed.py, whose
merging this shares.

A tile holds M pairs of a query token and a head of one row: all heads read the same latents, so
that one reading of a latent serves M products of scores and M of values. The first RANK elements
are keys and values at once and lie in one tile; the rotated ones, keys alone, in another.

H query heads, C `rank` padded to a power of two, R rotary dimensions likewise, N positions of a
tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan, check_lse
from headrace.back.kernels.attention.triton_fixed import (
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    ROW_BUCKETS,
    SPLIT_TOKENS,
)
from headrace.back.kernels.attention.triton_rows import pick, row_spans
from headrace.back.kernels.attention.triton_softmax import (
    SUMS,
    fixed_step,
    merge_results,
    store_lse,
)
from headrace.back.kernels.kv_write.quantized import E2M1
from headrace.back.kernels.latent_attention.op import (
    LatentAttentionFunction,
    LatentAttentionProblem,
)
from headrace.back.kernels.latent_write.quantized import SCALE_BYTES, typed, value_bytes
from headrace.back.kernels.latent_write.triton_latent_write import unsupported_form
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    num_sms,
    power_of_two,
    unsupported,
)

QUERIES, POSITIONS = 16, 32
"""M and N. Results depend on N alone."""
MAX_RANK = 512
CUT_ITEMS = 2048
"""Items (split, tile of heads) of rows that are cut: about eight for each program of the largest
devices. It bounds the memory of their results: 67 MB at rank 512, whatever the heads."""


@triton.jit
def _e4m3(b_bits):
    """The numbers of bytes, int32."""
    b_size = b_bits & 127
    b_normal = ((b_size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    b_size = tl.where(b_size < 8, b_size.to(tl.float32) * 0.001953125, b_normal)
    return tl.where(b_bits & 128 == 0, b_size, -b_size)


@triton.jit
def latent_tiles(
    kv, scales, b_block, o_n, m_n, block_stride, dtype: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    RANK: tl.constexpr, C: tl.constexpr, ROTARY: tl.constexpr, R: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Both parts of the latents [N, C] and [N, R] of positions o_n, of quantized ones (1: of bytes,
    2: of e2m1 numbers) as kernels/latent_write/quantized.py says. `block_stride`: elements."""
    WIDTH: tl.constexpr = RANK // 2 + RANK // 16 + ROTARY if QUANTIZED == 2 else RANK + ROTARY
    o_c = tl.arange(0, C)[None, :]
    o_r = tl.arange(0, R)[None, :]
    m_c = m_n[:, None] & (o_c < RANK)
    m_r = m_n[:, None] & (o_r < ROTARY)
    p_n = kv + (b_block * block_stride + o_n % BLOCK_TOKENS * WIDTH)[:, None]
    if QUANTIZED == 2:
        HALF: tl.constexpr = RANK // 2
        p_n = p_n.to(tl.pointer_type(tl.uint8), bitcast=True)
        b_byte = tl.load(p_n + o_c % HALF, mask=m_c, other=0).to(tl.int32)
        b_number = (b_byte >> (o_c // HALF * 4)) & 15
        b_group = tl.load(p_n + HALF + o_c // 16, mask=m_c, other=0).to(tl.int32)
        b_size = b_number & 7
        b_large = tl.where(b_size < 6, b_size - 2, 2 * b_size - 8).to(tl.float32)
        b_c = tl.where(b_size < 4, b_size.to(tl.float32) * 0.5, b_large)
        b_c = tl.where(b_number < 8, b_c, -b_c) * _e4m3(b_group)
        p_turned = p_n + HALF + RANK // 16
        b_k = _e4m3(tl.load(p_turned + o_r, mask=m_r, other=0).to(tl.int32))
    else:
        b_c = tl.load(p_n + o_c, mask=m_c, other=0.0)
        b_k = tl.load(p_n + RANK + o_r, mask=m_r, other=0.0)
    if QUANTIZED:
        p_scale = scales + b_block * (block_stride // 4) + BLOCK_TOKENS * WIDTH // 4
        p_scale = p_scale + o_n % BLOCK_TOKENS * 2
        b_own = tl.load(p_scale, mask=m_n, other=0.0)[:, None]
        b_turned = tl.load(p_scale + 1, mask=m_n, other=0.0)[:, None]
        b_c = (b_c.to(tl.float32) * b_own).to(dtype)
        b_k = (b_k.to(tl.float32) * b_turned).to(dtype)
    return b_c, b_k


def form_number(form: str | None) -> int:
    """QUANTIZED of the kernels."""
    return 0 if form is None else 2 if form in E2M1 else 1


def stored_width(rank: int, rotary: int, form: str | None) -> int:
    """Elements of a token in the cache."""
    width = rank + rotary
    return width if form is None else value_bytes(width, rank, form) + SCALE_BYTES


@triton.jit
def _attend_split(
    b_q, b_r, p_table, kv, scales, begin, end, b_position, factor, block_stride,
    M: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, C: tl.constexpr, ROTARY: tl.constexpr,
    R: tl.constexpr, BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of positions begin .. end."""
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sums = tl.zeros([M, SUMS], tl.float32)
    b_acc = tl.zeros([M, C], tl.float32)
    b_ones = tl.full([N, SUMS], 1.0, b_q.dtype)
    for start in range(begin, end, N):
        o_n = start + tl.arange(0, N)
        m_n = o_n < end
        b_block = tl.load(p_table + o_n // BLOCK_TOKENS, mask=m_n, other=0).to(tl.int64)
        b_c, b_k = latent_tiles(
            kv, scales, b_block, o_n, m_n, block_stride, b_q.dtype, BLOCK_TOKENS, RANK, C, ROTARY,
            R, QUANTIZED,
        )  # fmt: skip
        b_s = tl.dot(b_q, tl.trans(b_c), input_precision="ieee")
        b_s = tl.dot(b_r, tl.trans(b_k), b_s, input_precision="ieee")
        seen = m_n[None, :] & (o_n[None, :] <= b_position[:, None])
        b_s = tl.where(seen, b_s, float("-inf"))
        b_max, b_sums, b_acc = fixed_step(b_s, b_max, b_sums, b_acc, b_c, b_ones, factor)
    return b_max, tl.max(b_sums, axis=1), b_acc


@triton.jit
def latent_kernel(
    q, kv, scales, out, lse, starts, lengths, table, partial, counters, num_rows, block_stride,
    table_stride, factor, HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr, RANK: tl.constexpr, C: tl.constexpr,
    ROTARY: tl.constexpr, R: tl.constexpr, BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr,
    LSE: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: any. An item is (row, split) of rows that are cut, and else (row, tile of its pairs of
    query and head); of a cut row there is one for each tile of heads. `partial` float32
    [MAX_SPLITS, H, C+2]."""
    enter(DEPENDENT)
    WIDTH: tl.constexpr = RANK + ROTARY
    TILES: tl.constexpr = (HEADS + M - 1) // M
    o_w, b_queries, b_length, _ = row_spans(starts, lengths, num_rows, 0, ROWS)
    b_splits = tl.where(b_queries == 1, tl.cdiv(b_length, SPLIT_TOKENS), 0)
    b_splits = tl.where(b_splits > 1, b_splits, 0)
    b_stored = tl.cumsum(b_splits, axis=0)
    b_splits = tl.where(b_stored <= MAX_SPLITS, b_splits, 0)
    b_items = tl.where(b_splits > 0, b_splits * TILES, tl.cdiv(b_queries * HEADS, M))
    b_until = tl.cumsum(b_items, axis=0)
    total = tl.sum(b_items, axis=0)
    o_m = tl.arange(0, M)
    o_c = tl.arange(0, C)
    o_r = tl.arange(0, R)
    m_c = o_c < RANK
    for i_work in range(tl.program_id(0), total, tl.num_programs(0)):
        i_row = tl.sum((b_until <= i_work).to(tl.int32), axis=0)
        here = o_w == i_row
        queries, length = pick(b_queries, here), pick(b_length, here)
        items = pick(b_items, here)
        i_item = i_work - (pick(b_until, here) - items)
        splits = pick(b_splits, here)
        is_cut = splits > 0
        i_tile = tl.where(is_cut, i_item % TILES, items - 1 - i_item)  # later queries see more
        i_split = tl.where(is_cut, i_item // TILES, 0)
        o_pair = i_tile * M + o_m
        m_m = o_pair < queries * HEADS
        o_query = o_pair // HEADS
        o_head = o_pair % HEADS
        o_token = tl.load(starts + i_row).to(tl.int64) + o_query
        p_q = q + ((o_token * HEADS + o_head) * WIDTH)[:, None]
        b_q = tl.load(p_q + o_c[None, :], mask=m_m[:, None] & m_c[None, :], other=0.0)
        b_r = tl.load(
            p_q + RANK + o_r[None, :], mask=m_m[:, None] & (o_r < ROTARY)[None, :], other=0.0
        )
        b_position = tl.minimum(length - queries + o_query, length - 1)
        end = tl.minimum(length - queries + (i_tile * M + M - 1) // HEADS + 1, length)
        p_table = table + tl.cast(i_row, tl.int64) * table_stride

        to_split = tl.where(is_cut, i_split + 1, tl.cdiv(end, SPLIT_TOKENS))
        b_max = tl.full([M], float("-inf"), tl.float32)
        b_sum = tl.zeros([M], tl.float32)
        b_acc = tl.zeros([M, C], tl.float32)
        for split in range(i_split, to_split):
            n_max, n_sum, n_acc = _attend_split(
                b_q, b_r, p_table, kv, scales, split * SPLIT_TOKENS,
                tl.minimum(split * SPLIT_TOKENS + SPLIT_TOKENS, end), b_position, factor,
                block_stride, M, N, RANK, C, ROTARY, R, BLOCK_TOKENS, QUANTIZED,
            )  # fmt: skip
            b_max, b_sum, b_acc = merge_results(b_max, b_sum, b_acc, n_max, n_sum, n_acc)

        is_done = splits == 0
        if is_cut:
            STEP: tl.constexpr = HEADS * (C + 2)
            p_row = partial + tl.cast(pick(b_stored, here) - splits, tl.int64) * STEP
            p_mine = p_row + tl.cast(i_split, tl.int64) * STEP + o_head * (C + 2)
            tl.store(p_mine[:, None] + o_c[None, :], b_acc, mask=m_m[:, None])
            tl.store(p_mine + C, b_max, mask=m_m)
            tl.store(p_mine + C + 1, b_sum, mask=m_m)
            tl.debug_barrier()
            p_counter = counters + i_row * TILES + i_tile
            is_done = tl.atomic_add(p_counter, 1, sem="acq_rel") == splits - 1
            if is_done:
                tl.store(p_counter, 0)
                b_max = tl.full([M], float("-inf"), tl.float32)
                b_sum = tl.zeros([M], tl.float32)
                b_acc = tl.zeros([M, C], tl.float32)
                for i in range(0, splits):
                    p_one = p_row + tl.cast(i, tl.int64) * STEP + o_head * (C + 2)
                    n_max = tl.load(p_one + C, mask=m_m, other=0.0, cache_modifier=".cg")
                    n_sum = tl.load(p_one + C + 1, mask=m_m, other=1.0, cache_modifier=".cg")
                    n_acc = tl.load(
                        p_one[:, None] + o_c[None, :], mask=m_m[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    b_max, b_sum, b_acc = merge_results(b_max, b_sum, b_acc, n_max, n_sum, n_acc)
        if is_done:
            p_out = out + ((o_token * HEADS + o_head) * RANK)[:, None] + o_c[None, :]
            b_out = (b_acc / b_sum[:, None]).to(out.dtype.element_ty)
            tl.store(p_out, b_out, mask=m_m[:, None] & m_c[None, :])
            if LSE:
                store_lse(lse + o_token * HEADS + o_head, b_max, b_sum, m_m)


def max_cut_splits(heads: int) -> int:
    """Splits whose results are left for another program to merge."""
    return min(MAX_SPLITS, max(1, CUT_ITEMS // triton.cdiv(heads, QUERIES)))


def bind(problem: LatentAttentionProblem) -> LatentAttentionFunction:
    """The kernel for one layer's heads."""
    heads, width = problem.heads, problem.width
    rank, rotary = power_of_two(problem.rank, least=16), power_of_two(problem.rotary, least=16)
    tiles = triton.cdiv(heads, QUERIES)
    max_splits = max_cut_splits(heads)
    constants = {
        "HEADS": heads, "M": QUERIES, "N": POSITIONS, "SPLIT_TOKENS": SPLIT_TOKENS,
        "MAX_SPLITS": max_splits, "RANK": problem.rank, "C": rank, "ROTARY": problem.rotary,
        "R": rotary, "BLOCK_TOKENS": problem.block_tokens,
        "QUANTIZED": form_number(problem.quantized),
    }  # fmt: skip
    stored = stored_width(problem.rank, problem.rotary, problem.quantized)

    def attention(
        q_THW: torch.Tensor, kv: torch.Tensor, plan: Plan, lse_TH: torch.Tensor | None = None
    ) -> torch.Tensor:
        if lse_TH is not None:
            check_lse(lse_TH, q_THW)
        assert q_THW.dtype == problem.dtype, q_THW.dtype
        assert kv.dtype == (torch.int8 if problem.quantized else problem.dtype), kv.dtype
        assert q_THW.is_contiguous() and q_THW.shape[1:] == (heads, width), q_THW.shape
        assert kv.stride()[1:] == (stored, 1), kv.stride()
        table, num_rows, device = plan.block_table_RB, len(plan.kv_len_R), q_THW.device
        assert table.stride(1) == 1 or table.shape[1] == 1
        assert num_rows * tiles <= COUNTERS, (num_rows, tiles)
        out_THC = q_THW.new_empty((q_THW.shape[0], heads, problem.rank))
        partial = torch.empty(max_splits * heads * (rank + 2), dtype=torch.float32, device=device)
        latent_kernel[(num_sms(device) * PROGRAMS_PER_SM,)](
            q_THW, *typed(kv, problem.quantized), out_THC, lse_TH, plan.query_start_R1, plan.kv_len_R, table, partial,
            counters(device), num_rows, kv.stride(0), table.stride(0),
            problem.scale * 1.4426950408889634, LSE=lse_TH is not None,
            ROWS=next(size for size in ROW_BUCKETS if size >= num_rows), num_warps=4,
            num_stages=1 if problem.dtype is torch.float32 else 2, **constants, **launch(device),
        )  # fmt: skip
        return out_THC

    return attention


def _supports(problem: LatentAttentionProblem) -> str | None:
    if problem.rank > MAX_RANK:
        return f"rank {problem.rank} is above {MAX_RANK}"
    reason = unsupported(problem.device, problem.dtype)
    return reason or unsupported_form(problem.quantized, problem.rank)


KERNEL = Kernel(name="triton fixed order", supports=_supports, bind=bind, invariant=True)
