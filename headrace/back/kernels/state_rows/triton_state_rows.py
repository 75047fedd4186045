"""The state of a step's rows in Triton: one program per row and tile of its bytes, which ends at
once where nothing is to be done."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.triton_gated_scan import row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.state_rows.op import StateRows, StateRowsProblem
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 4096


@triton.jit(do_not_specialize=["states"])
def state_rows_kernel(
    rows,
    start,
    length,
    table,
    state,
    snapshots,
    states,
    columns,
    state_stride,
    snapshot_stride,
    BYTES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    i_r = tl.program_id(0)
    row, first, last = row_tokens(rows, start, states, i_r)
    position = tl.load(length + i_r)
    if not KEEPS:
        position -= (last - first).to(tl.int32)
    block = position // BLOCK_TOKENS - 1
    ends = (position % BLOCK_TOKENS == 0) & (block >= 0) & (first < last)
    slot = tl.load(table + i_r * columns + block, mask=ends, other=0).to(tl.int64)
    o_z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_z = (o_z < BYTES) & (first < last)
    p_state = state + row * state_stride + o_z
    p_snapshot = snapshots + slot * snapshot_stride + o_z
    if KEEPS:
        b_z = tl.load(p_state, mask=m_z & (slot > 0), other=0)
        tl.store(p_snapshot, b_z, mask=m_z & (slot > 0))
    else:
        b_z = tl.load(p_snapshot, mask=m_z & (slot > 0), other=0)
        tl.store(p_state, b_z, mask=m_z & ((slot > 0) | (position <= 0)))


def _bind(problem: StateRowsProblem, *, keeps: bool) -> StateRows:
    def state_rows(
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        kv_len_R: torch.Tensor,
        table_RB: torch.Tensor,
        state_MZ: torch.Tensor,
        snapshots_SZ: torch.Tensor,
    ) -> None:
        assert table_RB.is_contiguous() and state_MZ.stride(1) == snapshots_SZ.stride(1) == 1
        num_bytes = state_MZ.shape[1]
        state_rows_kernel[(row_R.shape[0], triton.cdiv(num_bytes, TILE))](
            row_R, query_start_R1, kv_len_R, table_RB, state_MZ, snapshots_SZ,
            state_MZ.shape[0] - 1, table_RB.shape[1], state_MZ.stride(0), snapshots_SZ.stride(0),
            BYTES=num_bytes, BLOCK_TOKENS=problem.block_tokens, KEEPS=keeps, BLOCK=TILE,
            num_warps=4, **launch(state_MZ.device),
        )  # fmt: skip

    return state_rows


def _kernel(*, keeps: bool) -> Kernel[StateRowsProblem]:
    return Kernel(
        name="triton",
        supports=lambda problem: unsupported(problem.device, torch.float32),
        bind=lambda problem: _bind(problem, keeps=keeps),
        invariant=True,
    )


BEGIN_KERNEL, KEEP_KERNEL = _kernel(keeps=False), _kernel(keeps=True)
