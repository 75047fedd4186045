"""Token scores in Triton, in one launch: rows are cut into chunks, of which one program each takes
the sum, the greater logits and the greatest ones; the program that finishes a row's last chunk puts
them together.

A logit and its id make one sortable integer, as in kernels/greedy; the greatest are taken one after
the other. What is compiled depends neither on the number of alternatives nor, up to 100 chunks, on
the width: a first request that asks for log-probabilities compiles nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.token_scores.op import MOST, ScoreTable, TokenScores, TokenScoresProblem
from headrace.back.kernels.triton.grid import enter, ordered
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    power_of_two,
    unsupported,
)

CHUNK = 4096
USUAL_CHUNKS = 128
USUAL_SLOTS = 2048
COLUMNS = power_of_two(MOST + 1)
PARTS = 3
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _finite_or_zero(x):
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def _chunk(p_row, token, p_part, p_best, i_chunk, width, count, CHUNK: tl.constexpr):
    """Stores a chunk's greatest logit, its sum of exp over that, how many logits are greater than
    the token's, and the keys of the `count` greatest."""
    o_v = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_v = o_v < width
    b_x = tl.load(p_row + o_v, mask=m_v, other=float("-inf"))
    most = tl.max(b_x, axis=0)
    chosen = tl.load(p_row + token)
    tl.store(p_part, most)
    tl.store(p_part + 1, tl.sum(tl.exp(b_x - _finite_or_zero(most)), axis=0))
    tl.store(p_part + 2, tl.sum((m_v & (b_x > chosen)).to(tl.float32), axis=0))
    b_key = (ordered(b_x).to(tl.int64) << 32) | (0x7FFFFFFF - o_v).to(tl.int64)
    b_key = tl.where(m_v, b_key, _NONE)
    for j in range(0, count):
        best = tl.max(b_key, axis=0)
        tl.store(p_best + j, best)
        b_key = tl.where(b_key == best, _NONE, b_key)


@triton.jit
def _row(
    p_row, token, p_part, p_best, p_scores, chunks, count, CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Puts a row's chunks together."""
    o_c = tl.arange(0, CHUNKS)
    m_c = o_c < chunks
    p_c = p_part + o_c * PARTS
    b_most = tl.load(p_c, mask=m_c, other=float("-inf"), cache_modifier=".cg")
    b_sum = tl.load(p_c + 1, mask=m_c, other=0.0, cache_modifier=".cg")
    b_greater = tl.load(p_c + 2, mask=m_c, other=0.0, cache_modifier=".cg")
    base = _finite_or_zero(tl.max(b_most, axis=0))
    b_scale = tl.where(b_most == float("-inf"), 0.0, tl.exp(_finite_or_zero(b_most) - base))
    lse = base + tl.log(tl.sum(b_sum * b_scale, axis=0))
    rank = 1 + tl.sum(b_greater.to(tl.int32), axis=0)

    o_s = tl.arange(0, SLOTS)
    b_key = tl.load(p_best + o_s, mask=o_s < chunks * count, other=_NONE, cache_modifier=".cg")
    o_j = tl.arange(0, COLUMNS)
    b_id = tl.where(o_j == 0, token, 0).to(tl.int32)
    for j in range(0, count):
        best = tl.max(b_key, axis=0)
        b_id = tl.where(o_j == j + 1, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), b_id)
        b_key = tl.where(b_key == best, _NONE, b_key)
    m_j = o_j <= count
    b_value = tl.load(p_row + b_id, mask=m_j, other=0.0) - lse
    tl.store(p_scores + o_j, b_id, mask=m_j)
    tl.store(p_scores + count + 1 + o_j, b_value.to(tl.int32, bitcast=True), mask=m_j)
    tl.store(p_scores + 2 * count + 2, rank)
    tl.store(p_scores + 2 * count + 3, lse.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["chunks", "count"])
def token_scores_kernel(
    logits,
    token,
    scores,
    part,
    best,
    counters,
    row_stride,
    width,
    chunks,
    count,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, chunks); `count` alternatives; `part` float32 [rows, chunks, PARTS], `best` int64
    [rows, chunks, count], `scores` int32 [rows, 2 count + 4]."""
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    enter(DEPENDENT)
    p_row = logits + i_row * row_stride
    p_part = part + i_row * chunks * PARTS
    p_best = best + i_row * chunks * count
    i_token = tl.load(token + i_row)
    _chunk(
        p_row, i_token, p_part + i_chunk * PARTS, p_best + i_chunk * count, i_chunk, width, count,
        CHUNK,
    )  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(counters + i_row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + i_row, 0)
        _row(
            p_row, i_token, p_part, p_best, scores + i_row * (2 * count + 4), chunks, count, CHUNKS,
            SLOTS, COLUMNS, PARTS,
        )  # fmt: skip


def bind(problem: TokenScoresProblem) -> TokenScores:
    """The kernel."""

    def token_scores(logits_MV: torch.Tensor, token_M: torch.Tensor, scores: ScoreTable) -> None:
        assert logits_MV.dtype == torch.float32 and logits_MV.stride(1) == 1, logits_MV.stride()
        assert token_M.dtype == torch.int64 and token_M.is_contiguous(), token_M.dtype
        (rows, width), device, count = logits_MV.shape, logits_MV.device, scores.columns - 1
        assert rows <= COUNTERS and count <= min(MOST, width), (rows, count)
        if not rows:
            return
        chunks = triton.cdiv(width, CHUNK)
        part = torch.empty(rows * chunks * PARTS, dtype=torch.float32, device=device)
        best = torch.empty(rows * chunks * count, dtype=torch.int64, device=device)
        token_scores_kernel[(rows, chunks)](
            logits_MV, token_M, scores.data, part, best, counters(device), logits_MV.stride(0), width,
            chunks, count, CHUNK=CHUNK, CHUNKS=power_of_two(chunks, least=USUAL_CHUNKS),
            SLOTS=power_of_two(chunks * MOST, least=USUAL_SLOTS), COLUMNS=COLUMNS, PARTS=PARTS,
            num_warps=8, **launch(device),
        )  # fmt: skip

    return token_scores


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=True,
)
