"""The end of the nucleus without a sort: one program per row narrows down the range of
probabilities in which it lies.

    sum of probs >= low reaches p; sum of probs >= high does not       (as bits: they order like the
        numbers)

Each pass over the row halves the range of bits between its least and greatest entry in the range,
until both are equal. So a row takes about as many passes as bits tell its candidates apart (20 to
30), ties end it at once, and rows do not wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.nucleus.op import Nucleus, NucleusProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import interpreted

TILE = 4096
MOST_PASSES = 70


@triton.jit
def _nucleus_kernel(probs, p, least, C, TILE: tl.constexpr, PASSES: tl.constexpr):
    """probs as int64 bits [K, C]; p and least as they are, float64 [K]."""
    i_k = tl.program_id(0)
    b_p = tl.load(p + i_k)
    p_row = probs + i_k.to(tl.int64) * C
    largest: tl.constexpr = 0x7FF0000000000000
    low = tl.full([], 0, tl.int64)
    high = tl.full([], largest, tl.int64)
    first = tl.full([], 0, tl.int64)
    passes = tl.full([], 0, tl.int32)
    while passes < PASSES:
        mid = low + (high - low + 1) // 2
        b_sum = tl.zeros([TILE], tl.float64)
        b_above = tl.full([TILE], largest, tl.int64)
        b_first = tl.full([TILE], largest, tl.int64)
        b_last = tl.full([TILE], -1, tl.int64)
        b_under = tl.full([TILE], -1, tl.int64)
        for start in range(0, C, TILE):
            o_c = start + tl.arange(0, TILE)
            m_c = o_c < C
            b_bits = tl.load(p_row + o_c, mask=m_c, other=-1)
            m_upper = m_c & (b_bits >= mid)
            m_inside = m_c & (b_bits >= low) & (b_bits < high)
            b_sum += tl.where(m_upper, b_bits.to(tl.float64, bitcast=True), 0.0)
            b_above = tl.minimum(b_above, tl.where(m_inside & m_upper, b_bits, largest))
            b_last = tl.maximum(b_last, tl.where(m_inside, b_bits, -1))
            b_first = tl.minimum(b_first, tl.where(m_inside, b_bits, largest))
            b_under = tl.maximum(b_under, tl.where(m_inside & (b_bits < mid), b_bits, -1))
        first = tl.min(b_first)
        reaches = tl.sum(b_sum) >= b_p
        above = tl.min(b_above)
        under = tl.max(b_under)
        last = tl.max(b_last)
        # what reaches p keeps the upper part, from its least entry on; else the lower part, up to
        # its greatest
        low = tl.where(reaches, above, first)
        high = tl.where(reaches, last + 1, under + 1)
        is_one = (high - low <= 1) | (first >= last)
        passes = tl.where(is_one, PASSES, passes + 1)
        first = tl.where(first >= last, first, low)
    tl.store(least + i_k, first.to(tl.float64, bitcast=True))


def bind(problem: NucleusProblem) -> Nucleus:
    """See the op."""

    def nucleus(probs_KC: torch.Tensor, p_K1: torch.Tensor) -> torch.Tensor:
        least_K1 = torch.empty_like(p_K1, memory_format=torch.contiguous_format)
        _nucleus_kernel[(probs_KC.shape[0],)](
            probs_KC.contiguous().view(torch.int64),
            p_K1.contiguous(),
            least_K1,
            probs_KC.shape[1],
            TILE=TILE,
            PASSES=MOST_PASSES,
            num_warps=8,
        )
        return least_K1

    return nucleus


def _supports(problem: NucleusProblem) -> str | None:
    here = "cpu" if interpreted() else "cuda"
    return None if problem.device == here else "runs on GPUs only"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
