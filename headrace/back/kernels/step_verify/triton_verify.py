"""Which drafts stand, in one launch: a program per row, and one per tile of padding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_inputs.op import (
    HEADER,
    ROWS,
    SLOT,
    TOKENS,
    StepInputsProblem,
    StepTables,
)
from headrace.back.kernels.step_verify.op import REJECTED, UNDRAFTED, StepVerify

TILE = 16
"""Query tokens of a row at most: its newest token and 15 drafts."""
PADDING = 128


@triton.jit(do_not_specialize=["T", "R"])
def _verify_kernel(
    words,
    token,
    value,
    tokens,
    length,
    count,
    ring,
    T,
    R,
    C,
    W,
    P: tl.constexpr,
    HEADER: tl.constexpr,
    SLOT: tl.constexpr,
    UNDRAFTED: tl.constexpr,
    REJECTED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PADDING: tl.constexpr,
):
    i_p = tl.program_id(0)
    p_ring = ring + tl.load(words + SLOT) * 2 * W
    if i_p < R:
        if i_p < tl.load(words + ROWS):
            row = tl.load(words + HEADER + i_p).to(tl.int64)
            start = tl.load(words + HEADER + 2 * P + i_p)
            num = tl.load(words + HEADER + 2 * P + i_p + 1) - start
            first = tl.load(words + HEADER + P + i_p) - num
            first = tl.minimum(first, tl.load(length + row) - 1)
            proposed = tl.minimum(tl.load(count + row), num - 1)
            o_i = tl.arange(0, TILE)
            m_i = o_i < num
            b_token = tl.load(token + start + o_i, mask=m_i, other=0).to(tl.int32)
            b_bits = tl.load(value + start + o_i, mask=m_i, other=0.0).to(tl.int32, bitcast=True)
            p_draft = tokens + row * C + first + 1 + o_i
            b_draft = tl.load(p_draft, mask=o_i < proposed, other=-1)
            # The first sample that no draft equals is the last one that counts.
            b_stop = tl.where((b_token != b_draft) | (o_i >= proposed), o_i, TILE)
            last = tl.min(b_stop, axis=0)
            tl.store(p_draft, b_token, mask=o_i <= last)
            b_rejected = tl.where(o_i <= proposed, REJECTED, UNDRAFTED)
            tl.store(p_ring + start + o_i, tl.where(o_i <= last, b_token, b_rejected), mask=m_i)
            tl.store(p_ring + W + start + o_i, b_bits, mask=m_i)
            tl.store(length + row, first + 2 + last)
    else:
        o_t = (i_p - R) * PADDING + tl.arange(0, PADDING)
        m_t = (o_t >= tl.load(words + TOKENS)) & (o_t < T)
        b_none = tl.full([PADDING], UNDRAFTED, tl.int32)
        tl.store(p_ring + o_t, b_none, mask=m_t)
        b_bits = tl.load(value + o_t, mask=m_t, other=0.0).to(tl.int32, bitcast=True)
        tl.store(p_ring + W + o_t, b_bits, mask=m_t)


def bind(problem: StepInputsProblem) -> StepVerify:
    """See the op."""

    def step_verify(
        words: torch.Tensor,
        token_T: torch.Tensor,
        value_T: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        ring_SXW: torch.Tensor,
    ) -> None:
        num_tokens = token_T.shape[0]
        num_rows = min(num_tokens, problem.max_rows)
        _verify_kernel[(num_rows + triton.cdiv(num_tokens, PADDING),)](
            words,
            token_T,
            value_T,
            tables.tokens_MC,
            tables.length_M,
            count_M,
            ring_SXW,
            num_tokens,
            num_rows,
            tables.tokens_MC.shape[1],
            ring_SXW.shape[2],
            P=problem.section,
            HEADER=HEADER,
            SLOT=SLOT,
            UNDRAFTED=UNDRAFTED,
            REJECTED=REJECTED,
            ROWS=ROWS,
            TOKENS=TOKENS,
            TILE=TILE,
            PADDING=PADDING,
        )

    return step_verify


def _supports(problem: StepInputsProblem) -> str | None:
    return None if problem.device == "cuda" else "runs on CUDA devices only"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
