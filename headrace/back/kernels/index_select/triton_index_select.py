"""Positions and groups chosen by an indexer's scores, in Triton: a kernel scores what each token
sees, a second one finds the highest of a token's scores by a radix select, four passes over their
bits, and writes their places in order. Of few tokens with long rows, as when few requests decode,
the passes are kernels over parts of a row. Nothing is scored where all is chosen, and nothing
behind a query is looked at.

The scores of some tokens at a time are kept, as integers of the same order; a step of a bucket has
room for what its tables hold. Positions are groups of one (kernels/group_select).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.index_select.op import IndexSelect, IndexSelectProblem, sample_of
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.sparse_latent_attention.triton_sparse_latent import row_of
from headrace.back.kernels.triton.grid import enter_late, ordered
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

log = logging.getLogger(__name__)

PLACES, HEADS = 64, 16
"""Of a tile of scores."""
READ = 2048
"""Scores that the select reads at once."""
PART, MOST_PARTS, FEW_TOKENS = 4096, 64, 64
"""Of few tokens with many scores each part has a program: positions, parts and tokens at most."""
KEPT = 1 << 26
"""Scores that are kept at once, at most: 268 MB."""
MAX_DIM = 512


@triton.jit
def place_of(start, length, rows, i_t):
    """The row of a token, any for padding, and its position, -1 for padding."""
    i_row = row_of(start, rows, i_t)
    is_padding = i_t >= tl.load(start + rows)
    i_row = tl.where(is_padding, 0, i_row)
    position = tl.load(length + i_row) - (tl.load(start + i_row + 1) - i_t)
    return i_row, tl.where(is_padding, -1, position)


@triton.jit
def score_bits(b_s):
    """int32 of the same order as the scores; any NaN above all."""
    return tl.where(b_s != b_s, 2147483647, ordered(b_s))


@triton.jit
def index_scores_kernel(
    q, weight, entries, start, length, table, scores, rows, first_token, q_token, weight_token,
    table_stride, block_stride, score_stride, HEADS: tl.constexpr, J: tl.constexpr,
    DIM: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on, tiles of N groups, whose entries lie as
    kernels/group_write says; SIZE: positions that a block of entries stands for."""
    enter_late(DEPENDENT)
    i_s, i_n = tl.program_id(0), tl.program_id(1)
    i_t = i_s + first_token
    i_row, position = place_of(start, length, rows, i_t)
    seen = (position + 1) // GROUP
    if (seen <= TOP_K) | (i_n * N >= seen):
        return
    o_n, o_i, o_j = i_n * N + tl.arange(0, N), tl.arange(0, I), tl.arange(0, J)
    m_n, m_i = o_n < seen, (o_i < DIM)[None, :]
    o_last = (o_n + 1) * GROUP - 1
    p_block = table + i_row.to(tl.int64) * table_stride + o_last // SIZE
    b_block = tl.load(p_block, mask=m_n, other=0).to(tl.int64)
    p_e = entries + (b_block * block_stride + o_last % SIZE // GROUP * DIM)[:, None]
    b_e = tl.load(p_e + o_i[None, :], mask=m_n[:, None] & m_i, other=0.0)
    b_score = tl.zeros([N], tl.float32)
    for first in range(0, HEADS, J):
        m_j = first + o_j < HEADS
        p_q = q + i_t.to(tl.int64) * q_token + (first + o_j)[:, None] * DIM + o_i[None, :]
        b_q = tl.load(p_q, mask=m_j[:, None] & m_i, other=0.0)
        p_w = weight + i_t.to(tl.int64) * weight_token + first + o_j
        b_w = tl.load(p_w, mask=m_j, other=0.0).to(tl.float32)
        b_s = tl.dot(b_e, tl.trans(b_q), input_precision="ieee")
        b_score += tl.sum(tl.where(b_s < 0.0, 0.0, b_s) * b_w[None, :], axis=1)
    p_score = scores + i_s.to(tl.int64) * score_stride + o_n
    tl.store(p_score, score_bits(b_score), mask=m_n)


@triton.jit
def _choose_digit(b_counts, wanted):
    """The digit of the lowest chosen score, of how many scores have each [256], and how many are
    still wanted below it."""
    b_above = tl.cumsum(b_counts, axis=0, reverse=True)
    digit = tl.sum((b_above >= wanted).to(tl.int32), axis=0) - 1
    o_digit = tl.arange(0, 256)
    return digit, wanted - tl.sum(tl.where(o_digit > digit, b_counts, 0), axis=0)


@triton.jit
def _take(p_score, p_chosen, o_s, seen, lowest, wanted, count, ties, LOCAL: tl.constexpr):
    """Writes those of the places o_s that are chosen behind `count` others; of equals to the lowest
    `ties` came before. Both with these."""
    b_bits = _turned(p_score, o_s, seen, LOCAL) ^ -2147483648
    m_n = o_s < seen
    b_tie = (m_n & (b_bits == lowest)).to(tl.int32)
    b_rank = ties + tl.cumsum(b_tie, axis=0)
    m_take = (m_n & (b_bits > lowest)) | ((b_tie == 1) & (b_rank <= wanted))
    b_take = m_take.to(tl.int32)
    tl.store(p_chosen + count + tl.cumsum(b_take, axis=0) - 1, o_s, mask=m_take)
    return count + tl.sum(b_take, axis=0), ties + tl.sum(b_tie, axis=0)


@triton.jit
def _take_all(p_chosen, seen, TOP_K: tl.constexpr, N: tl.constexpr):
    """Places [0, seen) and -1 behind them."""
    for first in range(0, TOP_K, N):
        o_k = first + tl.arange(0, N)
        tl.store(p_chosen + o_k, tl.where(o_k < seen, o_k, -1), mask=o_k < TOP_K)


@triton.jit
def select_kernel(
    scores, chosen, start, length, rows, first_token, score_stride, LISTS: tl.constexpr,
    TOP_K: tl.constexpr, GROUP: tl.constexpr, BEGUN: tl.constexpr, LOCAL: tl.constexpr,
    N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on, lists of each. BEGUN: groups are seen from their first
    position on, else from their last; the last LOCAL of those seen are always chosen."""
    enter_late(DEPENDENT)
    i_s, i_l = tl.program_id(0), tl.program_id(1)
    i_t = i_s + first_token
    _, position = place_of(start, length, rows, i_t)
    seen = (position + GROUP) // GROUP if BEGUN else (position + 1) // GROUP
    p_chosen = chosen + (i_t.to(tl.int64) * LISTS + i_l) * TOP_K
    if seen <= TOP_K:
        _take_all(p_chosen, seen, TOP_K, N)
        return
    o_n = tl.arange(0, N)
    p_score = scores + (i_s.to(tl.int64) * LISTS + i_l) * score_stride
    prefix = 0  # of the lowest chosen score, whose sign bit is turned: digits are then in order
    wanted = TOP_K
    for shift in tl.static_range(24, -8, -8):
        b_counts = tl.zeros([256], tl.int32)
        for first in range(0, seen, N):
            b_bits = _turned(p_score, first + o_n, seen, LOCAL)
            m_n = first + o_n < seen
            if shift < 24:
                m_n = m_n & (((b_bits ^ prefix) >> (shift + 8)) == 0)
            b_counts += tl.histogram((b_bits >> shift) & 255, 256, mask=m_n).to(tl.int32)
        digit, wanted = _choose_digit(b_counts, wanted)
        prefix = prefix | (digit << shift)
    lowest = prefix ^ -2147483648
    count, ties = 0, 0
    for first in range(0, seen, N):
        count, ties = _take(
            p_score, p_chosen, first + o_n, seen, lowest, wanted, count, ties, LOCAL
        )


@triton.jit
def _part_counts(hist, i_level, i_s, parts, seen, N: tl.constexpr, PARTS: tl.constexpr):
    """How many scores of each of a token's parts have each digit of a level, [PARTS, 256]."""
    o_p, o_digit = tl.arange(0, PARTS), tl.arange(0, 256)
    p_level = hist + (i_level * tl.num_programs(0) + i_s).to(tl.int64) * parts * 256
    m_p = o_p * N < seen
    return tl.load(p_level + o_p[:, None] * 256 + o_digit[None, :], mask=m_p[:, None], other=0)


@triton.jit
def count_part_kernel(
    scores, hist, start, length, rows, first_token, score_stride, parts, LEVEL: tl.constexpr,
    TOP_K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens from `first_token` on, parts of N scores. Counts the digits of a level among the
    scores whose digits of the levels before are those of the lowest chosen one. hist [4, tokens,
    parts, 256]; PARTS: `parts`, padded."""
    enter_late(DEPENDENT)
    i_s, i_p = tl.program_id(0), tl.program_id(1)
    _, position = place_of(start, length, rows, i_s + first_token)
    seen = position + 1
    if (seen <= TOP_K) | (i_p * N >= seen):
        return
    prefix, wanted = 0, TOP_K
    for level in tl.static_range(LEVEL):
        b_counts = tl.sum(_part_counts(hist, level, i_s, parts, seen, N, PARTS), axis=0)
        digit, wanted = _choose_digit(b_counts, wanted)
        prefix = prefix | (digit << (24 - 8 * level))
    o_n = i_p * N + tl.arange(0, N)
    b_bits = _turned(scores + i_s.to(tl.int64) * score_stride, o_n, seen, 0)
    m_n = o_n < seen
    if LEVEL:
        m_n = m_n & (((b_bits ^ prefix) >> (32 - 8 * LEVEL)) == 0)
    b_counts = tl.histogram((b_bits >> (24 - 8 * LEVEL)) & 255, 256, mask=m_n).to(tl.int32)
    p_mine = hist + ((LEVEL * tl.num_programs(0) + i_s).to(tl.int64) * parts + i_p) * 256
    tl.store(p_mine + tl.arange(0, 256), b_counts)


@triton.jit
def write_part_kernel(
    scores, chosen, hist, start, length, rows, first_token, score_stride, parts,
    TOP_K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid as before. Writes the chosen places of a part behind those of the parts before it."""
    enter_late(DEPENDENT)
    i_s, i_p = tl.program_id(0), tl.program_id(1)
    i_t = i_s + first_token
    _, position = place_of(start, length, rows, i_t)
    seen = position + 1
    p_chosen = chosen + i_t.to(tl.int64) * TOP_K
    if seen <= TOP_K:
        if i_p == 0:
            _take_all(p_chosen, seen, TOP_K, N)
        return
    if i_p * N >= seen:
        return
    o_p, o_digit = tl.arange(0, PARTS), tl.arange(0, 256)
    b_above = tl.zeros([PARTS], tl.int32)
    b_ties = tl.zeros([PARTS], tl.int32)
    prefix, wanted = 0, TOP_K
    for level in tl.static_range(4):
        b_parts = _part_counts(hist, level, i_s, parts, seen, N, PARTS)
        digit, wanted = _choose_digit(tl.sum(b_parts, axis=0), wanted)
        prefix = prefix | (digit << (24 - 8 * level))
        b_above += tl.sum(tl.where((o_digit > digit)[None, :], b_parts, 0), axis=1)
        b_ties = tl.sum(tl.where((o_digit == digit)[None, :], b_parts, 0), axis=1)
    b_left = tl.maximum(wanted - (tl.cumsum(b_ties, axis=0) - b_ties), 0)
    m_before = o_p < i_p
    count = tl.sum(tl.where(m_before, b_above + tl.minimum(b_left, b_ties), 0), axis=0)
    ties = tl.sum(tl.where(m_before, b_ties, 0), axis=0)
    p_score = scores + i_s.to(tl.int64) * score_stride
    o_n = i_p * N + tl.arange(0, N)
    _take(p_score, p_chosen, o_n, seen, prefix ^ -2147483648, wanted, count, ties, 0)


@triton.jit
def _turned(p_score, o_s, seen, LOCAL: tl.constexpr):
    """The scores' bits with the sign bit turned."""
    b_bits = tl.load(p_score + o_s, mask=o_s < seen, other=-2147483648)
    if LOCAL:
        b_bits = tl.where(o_s >= seen - LOCAL, 0x7F800000, b_bits)
    return b_bits ^ -2147483648


def parts_of(tokens: int, scores: int) -> Iterator[tuple[int, int]]:
    """(first, number) of the tokens whose scores, so many of each, are kept at once."""
    most = max(1, KEPT // max(1, scores))
    for first in range(0, tokens, most):
        yield first, min(most, tokens - first)


_whole: set[IndexSelectProblem] = set()
"""Problems whose rows are never cut into parts: the check of that failed."""


def bind(problem: IndexSelectProblem, *, part: int = PART) -> IndexSelect:
    """The kernels of one shape; `part` for tests."""
    select = EntrySelect(
        heads=problem.heads,
        dim=problem.dim,
        top_k=problem.top_k,
        group=1,
        block_tokens=problem.block_tokens,
        part=0 if problem in _whole else part,
    )

    def index_select(
        q_TJI: torch.Tensor, weight_TJ: torch.Tensor, keys: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        shape = (len(q_TJI), problem.top_k)
        chosen_TK = torch.empty(shape, dtype=torch.int32, device=q_TJI.device)
        select(q_TJI, weight_TJ, keys, plan, chosen_TK)
        return chosen_TK

    return index_select


class EntrySelect:
    """f(q_TJI, weight_TJ, entries, plan, chosen_TK): groups by their entries, into chosen_TK.
    `part`: see PART; for groups of one only, 0: rows are never cut."""

    def __init__(
        self, *, heads: int, dim: int, top_k: int, group: int, block_tokens: int, part: int = 0
    ) -> None:
        assert group == 1 or not part, (group, part)
        self._group, self._shape, self._part = group, (heads, dim), part
        self._scores = {
            "HEADS": heads, "J": HEADS, "DIM": dim, "I": max(16, power_of_two(dim)), "GROUP": group,
            "SIZE": max(block_tokens, group), "TOP_K": top_k, "N": PLACES,
        }  # fmt: skip
        self._select = {
            "LISTS": 1, "TOP_K": top_k, "GROUP": group, "BEGUN": False, "LOCAL": 0, "N": READ,
        }  # fmt: skip

    def __call__(
        self,
        q_TJI: torch.Tensor,
        weight_TJ: torch.Tensor,
        entries: torch.Tensor,
        plan: Plan,
        chosen_TK: torch.Tensor,
    ) -> None:
        heads, dim = self._shape
        assert q_TJI.shape[1:] == (heads, dim) and q_TJI.stride()[1:] == (dim, 1), q_TJI.stride()
        assert weight_TJ.stride(1) == 1 and entries.stride()[1:] == (dim, 1), entries.stride()
        starts, lengths, table = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        groups = max(1, plan.max_kv_len // self._group)
        for first, count in parts_of(len(q_TJI), groups):
            scores = torch.empty((count, groups), dtype=torch.int32, device=q_TJI.device)
            index_scores_kernel[(count, triton.cdiv(groups, PLACES))](
                q_TJI, weight_TJ, entries, starts, lengths, table, scores, len(lengths), first,
                q_TJI.stride(0), weight_TJ.stride(0), table.stride(0), entries.stride(0), groups,
                num_warps=4, **self._scores, **launch(q_TJI.device),
            )  # fmt: skip
            parts = triton.cdiv(groups, self._part) if self._part else 0
            if count <= FEW_TOKENS and 1 < parts <= MOST_PARTS:
                self._select_by_parts(scores, chosen_TK, plan, first, parts)
                continue
            select_kernel[(count, 1)](
                scores, chosen_TK, starts, lengths, len(lengths), first, groups, num_warps=8,
                **self._select, **launch(q_TJI.device),
            )  # fmt: skip

    def _select_by_parts(
        self,
        scores: torch.Tensor,
        chosen_TK: torch.Tensor,
        plan: Plan,
        first: int,
        parts: int,
    ) -> None:
        (count, groups), device = scores.shape, scores.device
        hist = torch.empty((4, count, parts, 256), dtype=torch.int32, device=device)
        rows = plan.query_start_R1, plan.kv_len_R, len(plan.kv_len_R)
        constants = {
            "TOP_K": self._select["TOP_K"], "N": self._part, "PARTS": power_of_two(parts),
            "num_warps": 8, **launch(device),
        }  # fmt: skip
        for level in range(4):
            count_part_kernel[(count, parts)](
                scores, hist, *rows, first, groups, parts, LEVEL=level, **constants
            )
        write_part_kernel[(count, parts)](
            scores, chosen_TK, hist, *rows, first, groups, parts, **constants
        )


def _supports(problem: IndexSelectProblem) -> str | None:
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    return unsupported(problem.device, problem.dtype)


def _plans(problem: IndexSelectProblem) -> list[PlanCheck]:
    """Rows by a program each, and in parts."""

    def skip(reason: str) -> None:
        log.warning("index_select goes without parts of rows: %s", reason)
        _whole.add(problem)

    long = [[(1, 2 * PART + 900), (1, 1), (1, PART), (1, problem.top_k + 5)]]
    return [
        PlanCheck(name="rows by a program each", sample=partial(sample_of, problem), bind=bind),
        PlanCheck(
            name="rows in parts", sample=partial(sample_of, problem, long), bind=bind, skip=skip
        ),
    ]


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=_plans, invariant=True)
