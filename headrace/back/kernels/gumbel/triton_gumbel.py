"""The draw in Triton: the reference's choice, with two logarithms in float64 for a few tokens only.

Rows are cut into chunks. A chunk's scores are taken in float32 first; only tokens within its error of the best are
scored exactly, in the order of their ids. The program that finishes a row's last chunk compares the chunks. The noise
is that of noise.py.

Error of a float32 score: the logarithm of the exponential noise is within 3e-5 (an approximate logarithm of at least
0.01, or a series below), z within 2^-22 of its size; z is the score less at most 64. MARGIN and MARGIN_RELATIVE are
twice that.

Exactly, log1p(-u) is taken as log(w) * -u / (w - 1) with w = 1 - u, good to a few units in the last place (Kahan;
Goldberg 1991, "What every computer scientist should know about floating-point arithmetic", theorem 4).
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

CHUNK = 8192
MARGIN = tl.constexpr(1e-4)
MARGIN_RELATIVE = tl.constexpr(1e-6)


@triton.jit
def random_bits(key, o_id):
    """The upper 63 bits of the noise of ids, int64; `key` int64 holds the bits of a uint64 (SplitMix64)."""
    G: tl.constexpr = 0x9E3779B97F4A7C15
    b_x = key.to(tl.uint64, bitcast=True) + (o_id.to(tl.uint64) + 1) * G
    b_x = (b_x ^ (b_x >> 30)) * 0xBF58476D1CE4E5B9
    b_x = (b_x ^ (b_x >> 27)) * 0x94D049BB133111EB
    return ((b_x ^ (b_x >> 31)) >> 1).to(tl.int64, bitcast=True)


@triton.jit
def quick_noise(key, o_id):
    """-log(exponential noise) in float32."""
    b_bits = random_bits(key, o_id)
    b_u = (b_bits.to(tl.float32) + 0.5) * 1.0842021724855044e-19
    b_w = ((0x7FFFFFFFFFFFFFFF - b_bits).to(tl.float32) + 0.5) * 1.0842021724855044e-19
    b_series = b_u * (1.0 + b_u * (0.5 + b_u * (0.3333333333 + b_u * 0.25)))
    return -tl.log(tl.where(b_u < 0.01, b_series, -tl.log(b_w)))


@triton.jit
def exact_noise(key, o_id):
    """-log(exponential noise) in float64."""
    u = (random_bits(key, o_id).to(tl.float64) + 0.5) * 1.0842021724855044e-19
    u = tl.minimum(u, 0.9999999999999999)
    w = 1.0 - u
    log = tl.where(w == 1.0, -u, tl.log(w) * u / (1.0 - w))
    return -tl.log(-log)


@triton.jit
def first_best(b_score, o_id, NONE: tl.constexpr):
    """(greatest score, lowest id that has it)."""
    best = tl.max(b_score, axis=0)
    return best, tl.min(tl.where(b_score == best, o_id, NONE), axis=0)


@triton.jit
def chunk_winner(p_row, width, i_chunk, heat, row_key, least, CHUNK: tl.constexpr):
    """(score float64, id) of the winner among a chunk's tokens whose logits are at least `least`; a NaN counts as
    infinite. Without any: (-Inf, the chunk's first id)."""
    NONE: tl.constexpr = 0x7FFFFFFF
    o_v = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(p_row + o_v, mask=o_v < width, other=float("-inf"))
    b_x = tl.where(b_x < least, float("-inf"), b_x)
    b_quick = b_x * (1.0 / heat).to(tl.float32) + quick_noise(row_key, o_v)
    b_quick = tl.where(b_quick != b_quick, float("inf"), b_quick)
    top = tl.max(b_quick, axis=0)
    margin = MARGIN + MARGIN_RELATIVE * (tl.abs(top) + 64.0)
    near = tl.where(tl.abs(top) == float("inf"), top, top - margin)
    left = b_quick >= near
    candidates = tl.where(top > float("-inf"), tl.sum(left.to(tl.int32), axis=0), 0)
    highest = heat * 0.0 + float("-inf")
    i_best = i_chunk * CHUNK
    for _ in range(0, candidates):
        i_next = tl.min(tl.where(left, o_v, NONE), axis=0)
        exact = tl.load(p_row + i_next).to(tl.float64) / heat + exact_noise(row_key, i_next)
        exact = tl.where(exact != exact, float("inf"), exact)
        i_best = tl.where(exact > highest, i_next, i_best)
        highest = tl.maximum(exact, highest)
        left = left & (o_v != i_next)
    return highest, i_best


@triton.jit
def row_winner(
    p_row, p_score, p_best, p_counter, p_token, p_z, chunks, heat, highest, i_best,
    i_chunk, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Keeps a chunk's winner; the program that finishes the row's last chunk stores the row's."""
    NONE: tl.constexpr = 0x7FFFFFFF
    tl.store(p_score + i_chunk, highest)
    tl.store(p_best + i_chunk, i_best)
    tl.debug_barrier()
    if tl.atomic_add(p_counter, 1, sem="acq_rel") == chunks - 1:
        tl.store(p_counter, 0)
        o_c = tl.arange(0, CHUNKS)
        m_c = o_c < chunks
        b_top = tl.load(p_score + o_c, mask=m_c, other=float("-inf"), cache_modifier=".cg")
        b_best = tl.load(p_best + o_c, mask=m_c, other=NONE, cache_modifier=".cg")
        _best, i_token = first_best(b_top, b_best, NONE)
        tl.store(p_token, i_token.to(tl.int64))
        tl.store(p_z, tl.load(p_row + i_token).to(tl.float64) / heat)


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
    enter(DEPENDENT)
    p_row = logits + i_row * row_stride
    heat, row_key = tl.load(temperature + i_row), tl.load(key + i_row)
    highest, i_best = chunk_winner(p_row, width, i_chunk, heat, row_key, float("-inf"), CHUNK)
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
