"""Sampling in Triton: the reference's choice, with two logarithms in float64 for a few tokens only
(triton_race.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gumbel.op import Gumbel, GumbelProblem
from headrace.back.kernels.gumbel.triton_race import row_winner, span_winner
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    power_of_two,
    unsupported,
)

CHUNK, TILE = 8192, 2048


@triton.jit
def gumbel_kernel(
    logits,
    temperature,
    key,
    score,
    best,
    counters,
    token,
    z,
    row_stride,
    width,
    chunks,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, chunks); `score` float64 and `best` int32, both [rows, chunks]."""
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    enter(DEPENDENT)
    p_row = logits + i_row * row_stride
    heat, row_key = tl.load(temperature + i_row), tl.load(key + i_row)
    begin, end = i_chunk * CHUNK, tl.minimum(i_chunk * CHUNK + CHUNK, width)
    b_top = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(begin, end, TILE):
        o_v = start + tl.arange(0, TILE)
        b_top = tl.maximum(b_top, tl.load(p_row + o_v, mask=o_v < end, other=float("-inf")))
    top = tl.max(b_top, axis=0)
    origin = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    highest, i_best = span_winner(
        p_row, p_row, p_row, begin, end, heat, row_key, origin, float("-inf"), False, TILE
    )
    row_winner(
        p_row, score + i_row * chunks, best + i_row * chunks, counters + i_row, token + i_row,
        z + i_row, chunks, heat, highest, i_best, i_chunk, CHUNKS,
    )  # fmt: skip


def bind(problem: GumbelProblem) -> Gumbel:
    """The kernel."""

    def gumbel(
        logits_KV: torch.Tensor, temperature_K: torch.Tensor, key_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert temperature_K.dtype == torch.float64 and key_K.dtype == torch.int64
        assert temperature_K.is_contiguous() and key_K.is_contiguous()
        (rows, width), device = logits_KV.shape, logits_KV.device
        assert rows <= COUNTERS, rows
        chunks = triton.cdiv(width, CHUNK)
        token_K = torch.empty(rows, dtype=torch.int64, device=device)
        z_K = torch.empty(rows, dtype=torch.float64, device=device)
        score = torch.empty(rows * chunks, dtype=torch.float64, device=device)
        best = torch.empty(rows * chunks, dtype=torch.int32, device=device)
        gumbel_kernel[(rows, chunks)](
            logits_KV, temperature_K, key_K, score, best, counters(device), token_K, z_K,
            logits_KV.stride(0), width, chunks, CHUNK=CHUNK, TILE=TILE,
            CHUNKS=power_of_two(chunks, least=32), num_warps=8, **launch(device),
        )  # fmt: skip
        return token_K, z_K

    return gumbel


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
)
