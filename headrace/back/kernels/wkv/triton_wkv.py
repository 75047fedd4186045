"""RWKV 4's weighted average in Triton: one program per row of the step and tile of channels, over
the row's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported
from headrace.back.kernels.wkv.op import Wkv, WkvProblem, check_weights

TILE = 256


@triton.jit(do_not_specialize=["states"])
def wkv_kernel(
    k,
    v,
    decay,
    first_weight,
    y,
    state,
    rows,
    start,
    states,
    k_stride,
    v_stride,
    state_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = (o_c < WIDTH) & (first < last)
    p_state = state + row * state_stride + o_c
    b_top = tl.load(p_state, mask=m_c, other=0.0)
    b_below = tl.load(p_state + WIDTH, mask=m_c, other=0.0)
    b_most = tl.load(p_state + 2 * WIDTH, mask=m_c, other=0.0)
    b_most = tl.where(b_below == 0.0, -1e30, b_most)
    b_decay = tl.load(decay + o_c, mask=m_c, other=0.0)
    b_first = tl.load(first_weight + o_c, mask=m_c, other=0.0)
    for t in range(first, last):
        b_k = tl.load(k + t * k_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_v = tl.load(v + t * v_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
        most = tl.maximum(b_most, b_k + b_first)
        kept, taken = tl.exp(b_most - most), tl.exp(b_k + b_first - most)
        b_y = (b_top * kept + b_v * taken) / (b_below * kept + taken)
        tl.store(y + t * WIDTH + o_c, b_y.to(y.dtype.element_ty), mask=m_c)
        most = tl.maximum(b_most - b_decay, b_k)
        kept, taken = tl.exp(b_most - b_decay - most), tl.exp(b_k - most)
        b_top = b_top * kept + b_v * taken
        b_below = b_below * kept + taken
        b_most = most
        if DEPTH:
            kept_row = behind(row, t, first, states, tl.program_id(0), DEPTH)
            p_kept = state + kept_row * state_stride + o_c
            tl.store(p_kept, b_top, mask=m_c)
            tl.store(p_kept + WIDTH, b_below, mask=m_c)
            tl.store(p_kept + 2 * WIDTH, b_most, mask=m_c)
    if not DEPTH:
        tl.store(p_state, b_top, mask=m_c)
        tl.store(p_state + WIDTH, b_below, mask=m_c)
        tl.store(p_state + 2 * WIDTH, b_most, mask=m_c)


def bind(problem: WkvProblem, decay_C: torch.Tensor, first_C: torch.Tensor) -> Wkv:
    """The kernel for one width."""
    check_weights(problem, decay_C, first_C)
    decay_C, first_C = decay_C.contiguous(), first_C.contiguous()

    def wkv(
        k_TC: torch.Tensor, v_TC: torch.Tensor, state_M3C: torch.Tensor, rows: ScanRows
    ) -> torch.Tensor:
        assert k_TC.stride(1) == v_TC.stride(1) == 1, (k_TC.stride(), v_TC.stride())
        y_TC, width = (
            torch.empty_like(k_TC, memory_format=torch.contiguous_format),
            problem.channels,
        )
        wkv_kernel[(rows.row_R.shape[0], triton.cdiv(width, TILE))](
            k_TC, v_TC, decay_C, first_C, y_TC, state_M3C, rows.row_R, rows.query_start_R1,
            rows.padding(state_M3C), k_TC.stride(0), v_TC.stride(0), state_M3C.stride(0),
            WIDTH=width, BLOCK=TILE, DEPTH=rows.depth, num_warps=4, **launch(k_TC.device),
        )  # fmt: skip
        return y_TC

    return wkv


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
