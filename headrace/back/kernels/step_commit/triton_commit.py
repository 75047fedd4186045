"""The commit in one launch of one program per 128 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_commit.op import StepCommit
from headrace.back.kernels.step_inputs.op import HEADER, SLOT, StepInputsProblem, StepTables

TILE = 128


@triton.jit(do_not_specialize=["R"])
def _commit_kernel(
    words,
    token,
    value,
    tokens,
    length,
    ring,
    R,
    C,
    W,
    P: tl.constexpr,
    HEADER: tl.constexpr,
    SLOT: tl.constexpr,
    LENGTHS: tl.constexpr,
    TILE: tl.constexpr,
):
    o_r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_r = o_r < R
    slot = tl.load(words + SLOT)
    b_token = tl.load(token + o_r, mask=m_r, other=0).to(tl.int32)
    b_bits = tl.load(value + o_r, mask=m_r, other=0.0).to(tl.int32, bitcast=True)
    p_ring = ring + slot * 2 * W + o_r
    tl.store(p_ring, b_token, mask=m_r)
    tl.store(p_ring + W, b_bits, mask=m_r)
    b_row = tl.load(words + HEADER + o_r, mask=m_r, other=0).to(tl.int64)
    b_position = tl.load(words + HEADER + P + o_r, mask=m_r, other=0)
    m_sample = m_r & (tl.load(words + HEADER + 3 * P + o_r, mask=m_r, other=0) > 0)
    if LENGTHS:
        p_start = words + HEADER + 2 * P + o_r
        b_num = tl.load(p_start + 1, mask=m_r, other=0) - tl.load(p_start, mask=m_r, other=0)
        b_newest = tl.load(length + b_row, mask=m_sample, other=0) - 1
        b_position = tl.minimum(b_position - b_num, b_newest) + b_num
        tl.store(length + b_row, b_position + 1, mask=m_sample)
    tl.store(tokens + b_row * C + b_position, b_token, mask=m_sample)


def bind(problem: StepInputsProblem) -> StepCommit:
    """See the op."""

    def step_commit(
        words: torch.Tensor,
        token_R: torch.Tensor,
        value_R: torch.Tensor,
        tables: StepTables,
        ring_SXW: torch.Tensor,
    ) -> None:
        count = token_R.shape[0]
        _commit_kernel[(triton.cdiv(count, TILE),)](
            words,
            token_R,
            value_R,
            tables.tokens_MC,
            words if tables.length_M is None else tables.length_M,
            ring_SXW,
            count,
            tables.tokens_MC.shape[1],
            ring_SXW.shape[2],
            P=problem.section,
            HEADER=HEADER,
            SLOT=SLOT,
            LENGTHS=tables.length_M is not None,
            TILE=TILE,
        )

    return step_commit


def _supports(problem: StepInputsProblem) -> str | None:
    return None if problem.device == "cuda" else "runs on CUDA devices only"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
