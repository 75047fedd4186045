"""Drafts by prompt lookup in one launch: a program per row walks over the row's tokens in tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.ngram_draft.op import NgramDraft, NgramDraftProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_inputs.op import StepTables

TILE = 1024
DRAFTS = 16
"""Drafts of a row at most, and one."""


@triton.jit
def _best_key(
    p_text,
    size,
    p_newest,
    known,
    most,
    first,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best place of a text as (match, `first`, whole, place) in one number that grows with what
    is preferred; 31 bits hold the place. -1: none."""
    best = tl.full([], -1, tl.int64)
    for begin in range(0, size - 1, TILE):
        o_e = begin + tl.arange(0, TILE)
        m_e = o_e < size - 1
        b_match = tl.zeros([TILE], tl.int32)
        b_equal = m_e
        for j in tl.static_range(MAX):
            b_there = tl.load(p_text + o_e - j, mask=b_equal & (o_e >= j), other=-1)
            b_own = tl.load(p_newest - j, mask=j < known, other=-2)
            b_equal = b_equal & (b_there == b_own)
            b_match += b_equal.to(tl.int32)
        b_whole = o_e + most < size
        b_place = tl.where(b_whole, o_e, 0x7FFFFFFF - o_e).to(tl.int64)
        b_rank = (b_match.to(tl.int64) * 2 + first) * 2 + b_whole.to(tl.int64)
        b_key = b_rank * 0x80000000 + b_place
        best = tl.maximum(best, tl.max(tl.where(m_e & (b_match >= MIN), b_key, -1), axis=0))
    return best


@triton.jit
def _ngram_kernel(
    rows,
    query_start,
    tokens,
    length,
    count,
    predicted,
    C,
    PREDICTED: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    TILE: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    i_r = tl.program_id(0)
    row = tl.load(rows + i_r).to(tl.int64)
    most = tl.load(query_start + i_r + 1) - tl.load(query_start + i_r) - 1
    known = tl.load(length + row)
    p_row = tokens + row * C
    p_newest = p_row + known - 1
    best = tl.full([], -1, tl.int64)
    other = tl.full([], 0, tl.int32)
    if most > 0:
        best = _best_key(p_row, known, p_newest, known, most, 0, MIN, MAX, TILE)
        if PREDICTED:
            other = tl.load(predicted + row)
            if (other > 0) & (known + most <= C - other):
                p_other = p_row + C - other
                there = _best_key(p_other, other, p_newest, known, most, 1, MIN, MAX, TILE)
                best = tl.maximum(best, there)
    drafts = tl.full([], 0, tl.int32)
    if best >= 0:
        is_whole = (best // 0x80000000) % 2 == 1
        is_other = (best // 0x100000000) % 2 == 1
        place = (best % 0x80000000).to(tl.int32)
        place = tl.where(is_whole, place, 0x7FFFFFFF - place)
        drafts = tl.minimum(tl.where(is_other, other, known) - 1 - place, most)
        p_text = p_row + tl.where(is_other, C - other, 0)
        o_d = tl.arange(0, DRAFTS)
        m_d = o_d < drafts
        b_draft = tl.load(p_text + place + 1 + o_d, mask=m_d, other=0)
        tl.store(p_row + known + o_d, b_draft, mask=m_d)
    tl.store(count + row, drafts)


def bind(problem: NgramDraftProblem) -> NgramDraft:
    """See the op."""

    def ngram_draft(
        row_R: torch.Tensor, query_start_R1: torch.Tensor, tables: StepTables, count_M: torch.Tensor
    ) -> None:
        _ngram_kernel[(row_R.shape[0],)](
            row_R,
            query_start_R1,
            tables.tokens_MC,
            tables.length_M,
            count_M,
            tables.predicted_M,
            tables.tokens_MC.shape[1],
            PREDICTED=tables.predicted_M is not None,
            MIN=problem.min_match,
            MAX=problem.max_match,
            TILE=TILE,
            DRAFTS=DRAFTS,
        )

    return ngram_draft


def _supports(problem: NgramDraftProblem) -> str | None:
    return None if problem.device == "cuda" else "runs on CUDA devices only"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
