"""The draw in Triton: every score in float64, rows cut into chunks; the program that finishes a row's last chunk
compares them. The noise is that of noise.py.

log1p(-u) is taken as log(w) * -u / (w - 1) with w = 1 - u, exact to a few units in the last place (Kahan; Goldberg
1991, "What every computer scientist should know about floating-point arithmetic", theorem 4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gumbel.op import Gumbel, GumbelProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    power_of_two,
    unsupported,
)

CHUNK = 2048


@triton.jit
def mix(b_x):
    """The finaliser of SplitMix64 on uint64."""
    b_x = (b_x ^ (b_x >> 30)) * 0xBF58476D1CE4E5B9
    b_x = (b_x ^ (b_x >> 27)) * 0x94D049BB133111EB
    return b_x ^ (b_x >> 31)


@triton.jit
def gumbel_noise(key, o_id):
    """-log(exponential noise) of ids, float64; `key` int64 holds the bits of a uint64."""
    G: tl.constexpr = 0x9E3779B97F4A7C15
    b_bits = mix(key.to(tl.uint64, bitcast=True) + (o_id.to(tl.uint64) + 1) * G) >> 1
    b_u = (b_bits.to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 1.0842021724855044e-19
    b_u = tl.minimum(b_u, 0.9999999999999999)
    b_w = 1.0 - b_u
    b_log = tl.where(b_w == 1.0, -b_u, tl.log(b_w) * b_u / (1.0 - b_w))
    return -tl.log(-b_log)


@triton.jit
def first_best(b_score, o_id, NONE: tl.constexpr):
    """(greatest score, lowest id that has it); a NaN is greater than any number."""
    b_score = tl.where(b_score != b_score, float("inf"), b_score)
    best = tl.max(b_score, axis=0)
    return best, tl.min(tl.where(b_score == best, o_id, NONE), axis=0)


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
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, chunks); `score` float64 and `best` int32, both [rows, chunks]."""
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    NONE: tl.constexpr = 0x7FFFFFFF
    enter(DEPENDENT)
    o_v = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(logits + i_row * row_stride + o_v, mask=o_v < width, other=float("-inf"))
    heat = tl.load(temperature + i_row)
    b_z = b_x.to(tl.float64) / heat
    b_score = b_z + gumbel_noise(tl.load(key + i_row), o_v)
    top, i_best = first_best(b_score, tl.where(o_v < width, o_v, NONE), NONE)
    tl.store(score + i_row * chunks + i_chunk, top)
    tl.store(best + i_row * chunks + i_chunk, i_best)
    tl.debug_barrier()
    if tl.atomic_add(counters + i_row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + i_row, 0)
        o_c = tl.arange(0, CHUNKS)
        p_c = i_row * chunks + o_c
        b_top = tl.load(score + p_c, mask=o_c < chunks, other=float("-inf"), cache_modifier=".cg")
        b_best = tl.load(best + p_c, mask=o_c < chunks, other=NONE, cache_modifier=".cg")
        top, i_token = first_best(b_top, b_best, NONE)
        tl.store(token + i_row, i_token.to(tl.int64))
        tl.store(z + i_row, tl.load(logits + i_row * row_stride + i_token).to(tl.float64) / heat)


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
            logits_KV.stride(0), width, chunks, CHUNK=CHUNK,
            CHUNKS=power_of_two(chunks, least=32), num_warps=8, **launch(device),
        )  # fmt: skip
        return token_K, z_K

    return gumbel


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
)
