"""The commit in one launch of one program per 128 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.step_commit.op import StepCommit
from headrace.back.kernels.step_inputs.op import HEADER, SLOT, StepInputsProblem

TILE = 128


@triton.jit(do_not_specialize=["R"])
def _commit_kernel(
    words,
    token,
    value,
    tokens,
    ring,
    R,
    C,
    M,
    P: tl.constexpr,
    HEADER: tl.constexpr,
    SLOT: tl.constexpr,
    TILE: tl.constexpr,
):
    o_r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_r = o_r < R
    slot = tl.load(words + SLOT)
    b_token = tl.load(token + o_r, mask=m_r, other=0).to(tl.int32)
    b_bits = tl.load(value + o_r, mask=m_r, other=0.0).to(tl.int32, bitcast=True)
    p_ring = ring + slot * 2 * M + o_r
    tl.store(p_ring, b_token, mask=m_r)
    tl.store(p_ring + M, b_bits, mask=m_r)
    b_row = tl.load(words + HEADER + o_r, mask=m_r, other=0).to(tl.int64)
    b_position = tl.load(words + HEADER + P + o_r, mask=m_r, other=0)
    m_sample = m_r & (tl.load(words + HEADER + 3 * P + o_r, mask=m_r, other=0) > 0)
    tl.store(tokens + b_row * C + b_position, b_token, mask=m_sample)


def bind(problem: StepInputsProblem) -> StepCommit:
    """See the op."""

    def step_commit(
        words: torch.Tensor,
        token_R: torch.Tensor,
        value_R: torch.Tensor,
        tokens_MC: torch.Tensor,
        ring_SRM: torch.Tensor,
    ) -> None:
        count = token_R.shape[0]
        _commit_kernel[(triton.cdiv(count, TILE),)](
            words,
            token_R,
            value_R,
            tokens_MC,
            ring_SRM,
            count,
            tokens_MC.shape[1],
            ring_SRM.shape[2],
            P=problem.section,
            HEADER=HEADER,
            SLOT=SLOT,
            TILE=TILE,
        )

    return step_commit


def _supports(problem: StepInputsProblem) -> str | None:
    return None if problem.device == "cuda" else "runs on CUDA devices only"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
