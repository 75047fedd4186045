"""Positions and groups chosen by an indexer's scores, in Triton: a kernel scores what each token
sees, a second one finds the highest of a token's scores by a radix select, four passes over their
bits, and writes their places in order. Nothing is scored where all is chosen, and nothing behind a
query is looked at.

Of long rows the select sees candidates alone: those scores that are not below a bound, which a
sample of the row gives, so that a little more than enough are left. Programs over parts of a row
count them, and then put them behind each other. Where there are fewer than enough, or too many, the
select goes over the whole row: what is chosen is the same.

The scores of some tokens at a time are kept, as integers of the same order; a step of a bucket has
room for what its tables hold. Positions are groups of one (kernels/group_select).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.attention.op import Plan
from headrace.back.kernels.index_select.op import IndexSelect, IndexSelectProblem, sample_of
from headrace.back.kernels.index_select.triton_select import (
    READ,
    bound_kernel,
    count_part_kernel,
    gather_part_kernel,
    place_of,
    select_candidates_kernel,
    select_kernel,
)
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.grid import enter_late, ordered
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

log = logging.getLogger(__name__)

HEADS = 16
"""Of a tile of a group's best keys, and of scores where there are few."""


@dataclass(frozen=True, kw_only=True)
class ScoreTiles:
    """Positions or groups of a tile of scores, heads of a product, and warps."""

    places: int = 128
    heads: int = 64
    num_warps: int = 4


def tiles_for(heads: int) -> ScoreTiles:
    """Those of an indexer of so many heads. On an H200 64 rows of 64 heads and 131,072 positions
    took 541 us with tiles of 128 x 64, 605 with 128 x 32, 654 with 64 x 64 and 798 with 64 x 16."""
    padded = max(HEADS, power_of_two(heads))
    return ScoreTiles(places=64 if padded == HEADS else 128, heads=min(64, padded))


PART, LEAST_PARTS = 4096, 2
"""Rows of so many parts and more are long: scores of a part, and of the sample."""
MOST_CANDIDATES, CANDIDATES = 4, 4096
"""Of a token, times what it chooses; read at once, as nearly always all are."""
KEPT = 1 << 26
"""Scores that are kept at once, at most: 268 MB."""
MAX_DIM = 512


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


def parts_of(tokens: int, scores: int) -> Iterator[tuple[int, int]]:
    """(first, number) of the tokens whose scores, so many of each, are kept at once."""
    most = max(1, KEPT // max(1, scores))
    for first in range(0, tokens, most):
        yield first, min(most, tokens - first)


_whole: set[IndexSelectProblem] = set()
"""Problems whose long rows are selected from as others: the check of candidates failed."""


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
    `part`: see PART; for groups of one only, 0: no row is long."""

    def __init__(
        self, *, heads: int, dim: int, top_k: int, group: int, block_tokens: int, part: int = 0,
        tiles: ScoreTiles | None = None,
    ) -> None:  # fmt: skip
        assert group == 1 or not part, (group, part)
        self._group, self._shape, self._part = group, (heads, dim), part
        tiles = tiles or tiles_for(heads)
        self._places = tiles.places
        self._scores = {
            "HEADS": heads, "J": tiles.heads, "DIM": dim, "I": max(16, power_of_two(dim)),
            "GROUP": group, "SIZE": max(block_tokens, group), "TOP_K": top_k, "N": tiles.places,
            "num_warps": tiles.num_warps,
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
        parts = triton.cdiv(groups, self._part) if self._part else 0
        is_long = parts >= LEAST_PARTS
        room = 2 * self._most if is_long else 0
        for first, count in parts_of(len(q_TJI), groups + room):
            scores = torch.empty((count, groups), dtype=torch.int32, device=q_TJI.device)
            index_scores_kernel[(count, triton.cdiv(groups, self._places))](
                q_TJI, weight_TJ, entries, starts, lengths, table, scores, len(lengths), first,
                q_TJI.stride(0), weight_TJ.stride(0), table.stride(0), entries.stride(0), groups,
                **self._scores, **launch(q_TJI.device),
            )  # fmt: skip
            if is_long:
                self.select_long(scores, chosen_TK, plan, first)
                continue
            select_kernel[(count, 1)](
                scores, chosen_TK, starts, lengths, len(lengths), first, groups, num_warps=8,
                **self._select, **launch(q_TJI.device),
            )  # fmt: skip

    @property
    def _most(self) -> int:
        return MOST_CANDIDATES * int(self._select["TOP_K"])

    def select_long(
        self, scores: torch.Tensor, chosen_TK: torch.Tensor, plan: Plan, first: int
    ) -> None:
        """Chooses for the tokens from `first` on, of long rows, whose scores are there."""
        (count, groups), device = scores.shape, scores.device
        parts = triton.cdiv(groups, self._part)
        bounds, counts, candidates = (
            torch.empty((count, *size), dtype=torch.int32, device=device)
            for size in ((), (parts,), (2, self._most))
        )
        rows = plan.query_start_R1, plan.kv_len_R, len(plan.kv_len_R), first, groups
        constants = {"TOP_K": self._select["TOP_K"], "num_warps": 8, **launch(device)}
        of_parts = {"N": self._part, **constants}
        bound_kernel[(count,)](scores, bounds, *rows, **of_parts)
        count_part_kernel[(count, parts)](scores, bounds, counts, *rows, **of_parts)
        gather_part_kernel[(count, parts)](
            scores, bounds, counts, candidates, *rows, MOST=self._most, **of_parts
        )
        select_candidates_kernel[(count,)](
            scores, counts, candidates, chosen_TK, *rows, parts, MOST=self._most, PART=self._part,
            N=CANDIDATES, **constants,
        )  # fmt: skip


def _supports(problem: IndexSelectProblem) -> str | None:
    if problem.dim > MAX_DIM:
        return f"keys of {problem.dim} are above {MAX_DIM}"
    return unsupported(problem.device, problem.dtype)


def _plans(problem: IndexSelectProblem) -> list[PlanCheck]:
    """Rows by a program each, and by candidates."""

    def skip(reason: str) -> None:
        log.warning("index_select selects from whole rows: %s", reason)
        _whole.add(problem)

    long = [[(1, LEAST_PARTS * PART + 900), (1, 1), (1, PART), (1, problem.top_k + 5)]]
    return [
        PlanCheck(name="rows by a program each", sample=partial(sample_of, problem), bind=bind),
        PlanCheck(
            name="long rows by candidates",
            sample=partial(sample_of, problem, long),
            bind=bind,
            skip=skip,
        ),
    ]


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=_plans, invariant=True)
