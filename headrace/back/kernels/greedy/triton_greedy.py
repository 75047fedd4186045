"""Greedy choice in Triton: rows are cut into chunks, so that one wide row keeps the device busy;
the program that finishes a row's last chunk compares them.

A logit and its id make one sortable integer: the bits of the float in signed order above (a NaN
greatest, -0 equal to +0), the complement of the id below, so that the lowest id wins among equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.greedy.op import Argmax, Greedy, GreedyProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    DTYPES,
    counters,
    launch,
    power_of_two,
    unsupported,
)

CHUNK = 4096


@triton.jit(do_not_specialize=["chunks"])
def greedy_kernel(
    logits,
    partial,
    counters,
    token,
    value,
    row_stride,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, chunks); `partial` int64 [rows, chunks]."""
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    enter(DEPENDENT)
    o_v = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(logits + i_row * row_stride + o_v, mask=o_v < width, other=float("-inf"))
    b_x = b_x.to(tl.float32)
    b_x = tl.where(b_x == 0.0, 0.0, b_x)
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_key = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    b_key = tl.where(b_x != b_x, 0x7FFFFFFF, b_key)
    b_packed = (b_key.to(tl.int64) << 32) | (0x7FFFFFFF - o_v).to(tl.int64)
    b_packed = tl.where(o_v < width, b_packed, -0x7FFFFFFFFFFFFFFF)
    tl.store(partial + i_row * chunks + i_chunk, tl.max(b_packed, axis=0))
    tl.debug_barrier()
    if tl.atomic_add(counters + i_row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + i_row, 0)
        o_c = tl.arange(0, CHUNKS)
        b_best = tl.load(
            partial + i_row * chunks + o_c, mask=o_c < chunks, other=-0x7FFFFFFFFFFFFFFF,
            cache_modifier=".cg",
        )  # fmt: skip
        i_token = 0x7FFFFFFF - (tl.max(b_best, axis=0) & 0x7FFFFFFF)
        tl.store(token + i_row, i_token)
        best = tl.load(logits + i_row * row_stride + i_token)
        tl.store(value + i_row, best.to(tl.float32))


def bind(problem: GreedyProblem) -> Greedy:
    """The kernel."""

    def greedy(logits_NV: torch.Tensor) -> Argmax:
        assert logits_NV.dtype in DTYPES and logits_NV.stride(1) == 1, logits_NV.stride()
        (rows, width), device = logits_NV.shape, logits_NV.device
        assert rows <= COUNTERS, rows
        chunks = triton.cdiv(width, CHUNK)
        token_N = torch.empty(rows, dtype=torch.int64, device=device)
        value_N = torch.empty(rows, dtype=torch.float32, device=device)
        partial = torch.empty(rows * chunks, dtype=torch.int64, device=device)
        greedy_kernel[(rows, chunks)](
            logits_NV, partial, counters(device), token_N, value_N, logits_NV.stride(0), width,
            chunks, CHUNK=CHUNK, CHUNKS=power_of_two(chunks, least=32), num_warps=8,
            **launch(device),
        )  # fmt: skip
        return token_N, value_N

    return greedy


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=True,
)
