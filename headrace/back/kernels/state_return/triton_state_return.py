"""The state of rows behind verified drafts in Triton: one program per row and tile of its bytes,
which ends at once where nothing is to be done."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.state_return.op import StateReturn, StateReturnProblem
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 4096


@triton.jit(do_not_specialize=["states"])
def state_return_kernel(
    rows,
    start,
    kv_len,
    length,
    state,
    states,
    stride,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    i_r = tl.program_id(0)
    row, first, last = row_tokens(rows, start, states, i_r)
    queries = last - first
    stand = tl.load(length + row) - (tl.load(kv_len + i_r) - queries) - 2
    moves = (stand > 0) & (stand < queries)
    kept = behind(row, first + stand, first, states, i_r, DEPTH)
    o_z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_z = (o_z < BYTES) & moves
    b_z = tl.load(state + kept * stride + o_z, mask=m_z, other=0)
    tl.store(state + row * stride + o_z, b_z, mask=m_z)


def bind(problem: StateReturnProblem) -> StateReturn:
    """The kernel for every size of state."""
    states, depth = problem.trail.first - 1, problem.trail.depth

    def state_return(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        length_M: torch.Tensor,
        state_XZ: torch.Tensor,
    ) -> None:
        assert state_XZ.stride(1) == 1, state_XZ.stride()
        num_bytes = state_XZ.shape[1]
        state_return_kernel[(row_R.shape[0], triton.cdiv(num_bytes, TILE))](
            row_R, query_start_R1, kv_len_R, length_M, state_XZ, states, state_XZ.stride(0),
            BYTES=num_bytes, BLOCK=TILE, DEPTH=depth, num_warps=4, **launch(state_XZ.device),
        )  # fmt: skip

    return state_return


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=True,
)
