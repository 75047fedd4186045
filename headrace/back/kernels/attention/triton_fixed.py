"""Attention whose results do not depend on the step: a query at a position gives the same bits as a
decode, in a chunk of any size, and beside any other rows.

The positions are cut at multiples of SPLIT_TOKENS, whatever the row. A split is one pass with a
running maximum over tiles that begin at multiples of N (Dao 2023, "FlashAttention-2"); splits are
then merged in their order, pair by pair, by multiplications and additions that are spelled out, so
that no compiler joins them differently in another kernel. The first rows with one query have a
program for each split (and KV head), and the one that comes last merges; other rows' tiles go
through their splits one after the other. Both are the same kernel, so which rows are which makes no
difference to the bits.

Steps of decodes take a small tile of M query-head pairs where that gives the bits of the large one:
a matrix instruction adds up along its inner dimension in one order, whatever its number of rows. So
sums over positions are products with ones and not reductions, whose order follows from how a tile
lies in its threads.

Few programs, each with many items of work in turn: how many items there are is known on the device
only.

H query heads, K KV heads, D head_dim, N positions of a tile, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention import triton_plans
from headrace.back.kernels.attention.op import (
    AttentionFunction,
    AttentionProblem,
    Plan,
    check_bias,
    check_lse,
)
from headrace.back.kernels.attention.triton_rows import (
    alibi,
    capped,
    first_seen,
    pick,
    row_spans,
)
from headrace.back.kernels.attention.triton_softmax import (
    SUMS,
    divisor,
    fixed_step,
    merge_results,
    store_lse,
)
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import shared_bytes
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    has_known_products,
    launch,
    num_sms,
    power_of_two,
    unsupported,
)

SPLIT_TOKENS = 512
"""Positions of a split."""
MAX_SPLITS = 1024
"""Splits that are left to be merged by another program; they take memory."""
PROGRAMS_PER_SM = 2
MAX_HEAD_DIM = 256
ROW_BUCKETS = (16, 64, 256, 1024, 4096)


@triton.jit
def _attend_split(
    b_q, p_table, p_head, lowest, begin, end, b_position, scale, softcap, block_stride, kind_stride,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, b_slope,
    ALIBI: tl.constexpr, CAUSAL: tl.constexpr, bias, o_query_head, BIAS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of positions begin .. end; below `lowest` nothing is read.
    `bias` [heads, BIAS_WIDTH]: added to the scores of positions so far before the query's."""
    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sums = tl.zeros([M, SUMS], tl.float32)
    b_acc = tl.zeros([M, D], tl.float32)
    b_ones = tl.full([N, SUMS], 1.0, b_q.dtype)
    for start in range(begin, end, N):
        o_n = start + tl.arange(0, N)
        m_n = (o_n >= lowest) & (o_n < end)
        b_block = tl.load(p_table + o_n // BLOCK_TOKENS, mask=m_n, other=0).to(tl.int64)
        p_k = (
            p_head
            + (b_block * block_stride + o_n % BLOCK_TOKENS * HEAD_DIM)[:, None]
            + o_d[None, :]
        )
        b_k = tl.load(p_k, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_v = tl.load(p_k + kind_stride, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if SOFTCAP:
            b_s = capped(b_s * scale, softcap, SOFTCAP)
            factor = 1.4426950408889634
        elif ALIBI or BIAS_WIDTH:
            b_s = b_s * scale
            factor = 1.4426950408889634
        else:
            factor = scale * 1.4426950408889634
        if ALIBI:
            b_s = b_s + alibi(b_slope, o_n, b_position)
        if BIAS_WIDTH:
            o_far = tl.maximum(b_position[:, None] - o_n[None, :], 0)
            o_far = o_query_head[:, None] * BIAS_WIDTH + tl.minimum(o_far, BIAS_WIDTH - 1)
            b_s = b_s + tl.load(bias + o_far)
        seen = m_n[None, :]
        if CAUSAL:
            seen = seen & (o_n[None, :] <= b_position[:, None])
        if WINDOW:
            seen = seen & (o_n[None, :] >= first_seen(b_position, WINDOW)[:, None])
        b_s = tl.where(seen, b_s, float("-inf"))
        b_max, b_sums, b_acc = fixed_step(b_s, b_max, b_sums, b_acc, b_v, b_ones, factor)
    return b_max, tl.max(b_sums, axis=1), b_acc


@triton.jit
def _start(sinks, o_query_head, m_m, M: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr):
    """Maximum, sum and values that a query's splits are merged into: its sink's where `m_m`."""
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    if SINKS:
        b_sink = tl.load(sinks + o_query_head, mask=m_m, other=float("-inf"))
        b_max = b_sink * 1.4426950408889634
        b_sum = tl.where(m_m, 1.0, 0.0)
    return b_max, b_sum, tl.zeros([M, D], tl.float32)


@triton.jit
def fixed_kernel(
    q, kv, sinks, slopes, bias, out, lse, starts, lengths, table, partial, counters, num_rows,
    q_token_stride, q_head_stride, out_token_stride, block_stride, kind_stride, head_stride, table_stride, scale,
    softcap, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS_WIDTH: tl.constexpr, LSE: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: any. A item is (row, split) of rows that are cut, and else (row, tile). `partial`
    float32 [MAX_SPLITS, K, GROUP, D+2]."""
    enter(DEPENDENT)
    QUERIES: tl.constexpr = M // GROUP
    o_r, b_queries, b_length, b_first = row_spans(starts, lengths, num_rows, WINDOW, ROWS)
    b_splits = tl.where(
        b_queries == 1, tl.cdiv(b_length, SPLIT_TOKENS) - b_first // SPLIT_TOKENS, 0
    )
    b_splits = tl.where(b_splits > 1, b_splits, 0)
    b_stored = tl.cumsum(b_splits, axis=0)
    b_splits = tl.where(b_stored <= MAX_SPLITS, b_splits, 0)
    b_items = tl.where(b_splits > 0, b_splits, tl.cdiv(b_queries, QUERIES))
    b_until = tl.cumsum(b_items, axis=0)
    total = tl.sum(b_items, axis=0) * KV_HEADS
    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    for i_work in range(tl.program_id(0), total, tl.num_programs(0)):
        i_item = i_work // KV_HEADS
        i_head = i_work % KV_HEADS
        i_row = tl.sum((b_until <= i_item).to(tl.int32), axis=0)
        here = o_r == i_row
        queries, length = pick(b_queries, here), pick(b_length, here)
        items = pick(b_items, here)
        i_split = i_item - (pick(b_until, here) - items)
        splits = pick(b_splits, here)
        is_cut = splits > 0
        # tiles of a long row from its end, since later queries see more
        first_query = tl.where(is_cut, 0, (items - 1 - i_split) * QUERIES)
        o_query = first_query + o_m // GROUP
        m_m = (o_m < QUERIES * GROUP) & (o_query < queries)
        o_token = tl.load(starts + i_row).to(tl.int64) + o_query
        o_query_head = i_head * GROUP + o_m % GROUP
        p_q = q + o_token * q_token_stride + o_query_head * q_head_stride
        b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_position = tl.minimum(length - queries + o_query, length - 1)
        lowest = first_seen(length - queries + first_query, WINDOW) if WINDOW else 0
        end = tl.minimum(length - queries + first_query + QUERIES, length)
        if not CAUSAL:
            end = length
        b_slope = tl.zeros([M], tl.float32)
        if ALIBI:
            b_slope = tl.load(slopes + o_query_head, mask=m_m, other=0.0)
        p_head = kv + tl.cast(i_head, tl.int64) * head_stride
        p_table = table + tl.cast(i_row, tl.int64) * table_stride

        from_split = lowest // SPLIT_TOKENS + tl.where(is_cut, i_split, 0)
        to_split = tl.where(is_cut, from_split + 1, tl.cdiv(end, SPLIT_TOKENS))
        b_max, b_sum, b_acc = _start(sinks, o_query_head, m_m & (splits == 0), M, D, SINKS)
        for split in range(from_split, to_split):
            begin = tl.maximum(split * SPLIT_TOKENS, lowest // N * N)
            n_max, n_sum, n_acc = _attend_split(
                b_q, p_table, p_head, lowest, begin,
                tl.minimum(split * SPLIT_TOKENS + SPLIT_TOKENS, end), b_position, scale, softcap,
                block_stride, kind_stride, M, N, HEAD_DIM, D, BLOCK_TOKENS, WINDOW, SOFTCAP,
                b_slope, ALIBI, CAUSAL, bias, o_query_head, BIAS_WIDTH,
            )  # fmt: skip
            b_max, b_sum, b_acc = merge_results(b_max, b_sum, b_acc, n_max, n_sum, n_acc)

        is_done = splits == 0
        if is_cut:
            STEP: tl.constexpr = KV_HEADS * GROUP * (D + 2)
            first = pick(b_stored, here) - splits
            p_row = partial + (tl.cast(first, tl.int64) * KV_HEADS + i_head) * (GROUP * (D + 2))
            p_mine = p_row + tl.cast(i_split, tl.int64) * STEP
            tl.store(p_mine + o_m[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None])
            tl.store(p_mine + GROUP * D + o_m, b_max, mask=m_m)
            tl.store(p_mine + GROUP * D + GROUP + o_m, b_sum, mask=m_m)
            tl.debug_barrier()
            p_counter = counters + i_row * KV_HEADS + i_head
            is_done = tl.atomic_add(p_counter, 1, sem="acq_rel") == splits - 1
            if is_done:
                tl.store(p_counter, 0)
                b_max, b_sum, b_acc = _start(sinks, o_query_head, m_m, M, D, SINKS)
                for i in range(0, splits):
                    p_one = p_row + tl.cast(i, tl.int64) * STEP
                    n_max = tl.load(
                        p_one + GROUP * D + o_m, mask=m_m, other=0.0, cache_modifier=".cg"
                    )
                    n_sum = tl.load(
                        p_one + GROUP * D + GROUP + o_m, mask=m_m, other=1.0, cache_modifier=".cg"
                    )
                    n_acc = tl.load(
                        p_one + o_m[:, None] * D + o_d[None, :], mask=m_m[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    b_max, b_sum, b_acc = merge_results(b_max, b_sum, b_acc, n_max, n_sum, n_acc)
        if is_done:
            p_out = out + o_token * out_token_stride + o_query_head * HEAD_DIM
            b_out = (b_acc / divisor(b_sum, CAUSAL)[:, None]).to(out.dtype.element_ty)
            m_out = m_m[:, None] & m_d[None, :]
            tl.store(p_out[:, None] + o_d[None, :], b_out, mask=m_out)
            if LSE:
                store_lse(lse + o_token * (KV_HEADS * GROUP) + o_query_head, b_max, b_sum, m_m)


@dataclass(frozen=True, kw_only=True)
class FixedAttentionTile:
    """Query-head pairs and positions of a tile, and how it is compiled. Bits depend on `n`, and may
    on the matrix instruction that `m` and `warps` lead to."""

    m: int
    n: int
    warps: int
    stages: int


def tile_of(problem: AttentionProblem) -> FixedAttentionTile:
    """The tile of a problem; its stages as shared memory allows."""
    depth, wide = power_of_two(problem.head_dim, least=16), problem.dtype is torch.float32
    m = power_of_two(problem.heads // problem.kv_heads, least=32 if wide else 64)
    n = 32 if wide or depth > 128 else 64
    room = shared_bytes() - m * (depth + n) * problem.dtype.itemsize
    most = 1 if wide else 3 if depth <= 128 else 2
    stages = max(1, min(most, 1 + room // (2 * n * depth * problem.dtype.itemsize)))
    return FixedAttentionTile(m=m, n=n, warps=8 if depth > 128 else 4, stages=stages)


def decode_tile(problem: AttentionProblem) -> FixedAttentionTile | None:
    """The tile of steps of decodes alone, where it gives the same bits: Ampere's instruction (16
    rows) and Hopper's (64) do, as test_fixed.py holds on the device at hand; those of later devices
    are not known to."""
    small = problem.heads // problem.kv_heads <= 16 and problem.head_dim <= 128
    if not small or problem.dtype is torch.float32 or not has_known_products():
        return None
    return replace(tile_of(problem), m=16, warps=2, stages=2)


def _small_tile(problem: AttentionProblem) -> FixedAttentionTile | None:
    return None if DECODES in triton_plans.skipped(problem) else decode_tile(problem)


def bind(
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None = None,
    bias_HW: torch.Tensor | None = None,
    *,
    tile: FixedAttentionTile | None = None,
) -> AttentionFunction:
    """The kernel for one layer's heads; `tile` for measurements."""
    assert (sinks_H is not None) == problem.sinks, problem
    check_bias(problem, bias_HW)
    bias_HW = None if bias_HW is None else bias_HW.float().contiguous()
    slopes_H = problem.slopes_tensor()
    kv_heads, depth = problem.kv_heads, power_of_two(problem.head_dim, least=16)
    usual = tile or tile_of(problem)
    of_decodes = tile or _small_tile(problem) or usual
    constants = {
        "KV_HEADS": kv_heads, "GROUP": problem.heads // kv_heads, "SPLIT_TOKENS": SPLIT_TOKENS,
        "MAX_SPLITS": MAX_SPLITS, "HEAD_DIM": problem.head_dim, "D": depth,
        "BLOCK_TOKENS": problem.block_tokens, "WINDOW": problem.reach,
        "SOFTCAP": problem.softcap is not None, "CAUSAL": problem.causal, "SINKS": problem.sinks,
        "ALIBI": bool(problem.slopes), "BIAS_WIDTH": problem.bias_width,
    }  # fmt: skip

    def attention(
        q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, lse_TH: torch.Tensor | None = None
    ) -> torch.Tensor:
        if lse_TH is not None:
            check_lse(lse_TH, q_THD)
        assert q_THD.dtype == kv.dtype == problem.dtype, (q_THD.dtype, kv.dtype)
        assert kv.stride()[3:] == (problem.head_dim, 1) and q_THD.stride(2) == 1, (kv.stride(),)
        assert plan.block_table_RB.stride(1) == 1 or plan.block_table_RB.shape[1] == 1
        num_rows, device = len(plan.kv_len_R), q_THD.device
        assert num_rows * kv_heads <= COUNTERS, (num_rows, kv_heads)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=device)
        partial = torch.empty(
            MAX_SPLITS * problem.heads * (depth + 2), dtype=torch.float32, device=device
        )
        tile = of_decodes if plan.max_query_len == 1 else usual
        programs = num_sms(device) * PROGRAMS_PER_SM * max(1, 4 // tile.warps)
        fixed_kernel[(programs,)](
            q_THD, kv, sinks_H, slopes_H, bias_HW, out_THD, lse_TH, plan.query_start_R1,
            plan.kv_len_R, plan.block_table_RB, partial, counters(device), num_rows, q_THD.stride(0),
            q_THD.stride(1), problem.heads * problem.head_dim, *kv.stride()[:3],
            plan.block_table_RB.stride(0), problem.scale, problem.softcap or 0.0,
            ROWS=next(size for size in ROW_BUCKETS if size >= num_rows), M=tile.m, N=tile.n,
            num_warps=tile.warps, num_stages=tile.stages, LSE=lse_TH is not None, **constants,
            **launch(device),
        )  # fmt: skip
        return out_THD

    return attention


def _supports(problem: AttentionProblem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
    if problem.heads % problem.kv_heads:
        return f"{problem.heads} heads are no multiple of {problem.kv_heads} KV heads"
    if problem.quantized:
        return "knows no quantized caches"
    if problem.late_length or problem.stripes:
        return "knows neither scores that grow nor sparse blocks"
    if problem.bias_rank:
        return "knows no biases that follow from states"
    return unsupported(problem.device, problem.dtype)


DECODES = "decodes in the small tile"


def plans(problem: AttentionProblem) -> list[PlanCheck]:
    """Decodes, by the tile of their own if there is one, and prompts beside them."""
    check = partial(triton_plans.check, problem, bind=bind)
    checks = []
    if _small_tile(problem) is not None:
        checks.append(check(DECODES, triton_plans.decodes(3)))
    mixed = triton_plans.prompts(problem, decodes=2)
    return [*checks, check(triton_plans.PROMPTS, mixed, needed=True)]


KERNEL = Kernel(
    name="triton fixed order", supports=_supports, bind=bind, plans=plans, invariant=True
)
