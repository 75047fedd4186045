"""Sampling in Triton, without a sort: what top_k and top_p keep of each row ends at one logit
(triton_truncate.py), what min_p keeps at another; then noise and argmax over what is kept, as
kernels/gumbel does it. Rows of which top_k has left few are sampled where their cut is found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.greedy.op import Argmax
from headrace.back.kernels.gumbel.triton_race import row_winner, span_winner
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sample.op import NUMBERS, RandomRows, SampleProblem
from headrace.back.kernels.sample.triton_truncate import (
    SAMPLED_BY_OP,
    STATE,
    cuts,
    key_of,
    least_by_min_p,
)
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    num_sms,
    power_of_two,
    unsupported,
)

TILE, MOST_TILES = 1024, 16
PROGRAMS = 16
"""Of a multiprocessor, before a program takes more than one tile."""


@triton.jit(do_not_specialize=["chunks", "tiles"])
def sample_kernel(
    logits,
    argmax,
    top,
    rows,
    row,
    position,
    state,
    cut,
    score,
    best,
    counters,
    token,
    z,
    row_stride,
    width,
    chunks,
    tiles,
    NUMBERS: tl.constexpr,
    STATE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows of the step, chunks), a chunk being `tiles` tiles; `score` float64 and `best`
    int32, both [rows of the step, chunks]."""
    i_k = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    enter(DEPENDENT)
    if tl.load(state + i_k * STATE) == SAMPLED_BY_OP:
        return
    p_numbers = rows + tl.load(row + i_k).to(tl.int64) * NUMBERS
    heat = tl.load(p_numbers).to(tl.float64, bitcast=True)
    highest = tl.load(top + i_k)
    if heat == 0.0:
        if i_chunk == 0:
            tl.store(token + i_k, tl.load(argmax + i_k))
            tl.store(z + i_k, highest.to(tl.float64))
        return
    p_row = logits + i_k * row_stride
    row_key = key_of(p_numbers, position + i_k)
    least = tl.maximum(tl.load(cut + i_k), least_by_min_p(p_numbers, highest, heat))
    begin = i_chunk * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, width)
    origin = tl.where(tl.abs(highest) < float("inf"), highest, 0.0)
    b_score, i_best = span_winner(
        p_row, p_row, p_row, begin, end, heat, row_key, origin, least, False, TILE
    )
    row_winner(
        p_row, score + i_k * chunks, best + i_k * chunks, counters + i_k, token + i_k,
        z + i_k, chunks, heat, b_score, i_best, i_chunk, CHUNKS,
    )  # fmt: skip


def bind(problem: SampleProblem) -> RandomRows:
    """See the op."""

    def sample(
        logits_KV: torch.Tensor,
        argmax: Argmax,
        rows: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
    ) -> Argmax:
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert rows.dtype == torch.int64 and rows.stride() == (NUMBERS, 1), rows.stride()
        (count, width), device = logits_KV.shape, logits_KV.device
        assert count <= COUNTERS and row_K.is_contiguous() and position_K.is_contiguous(), count
        in_all = triton.cdiv(width, TILE)
        tiles = max(1, min(MOST_TILES, in_all * count // (PROGRAMS * num_sms(device))))
        chunks = triton.cdiv(in_all, tiles)
        new = {"device": device}
        token_K = torch.empty(count, dtype=torch.int64, **new)
        z_K = torch.empty(count, dtype=torch.float64, **new)
        arguments = (rows, row_K, position_K)
        state, cut_K = cuts(logits_KV, argmax[1], arguments, (token_K, z_K))
        score = torch.empty(count * chunks, dtype=torch.float64, **new)
        best = torch.empty(count * chunks, dtype=torch.int32, **new)
        sample_kernel[(count, chunks)](
            logits_KV, *argmax, *arguments, state, cut_K, score, best, counters(device),
            token_K, z_K, logits_KV.stride(0), width, chunks, tiles, NUMBERS=NUMBERS,
            STATE=STATE, TILE=TILE,
            CHUNKS=power_of_two(in_all, least=32), num_warps=8, **launch(device),
        )  # fmt: skip
        return token_K, z_K

    return sample


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
)
