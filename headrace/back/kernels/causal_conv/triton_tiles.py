"""A short causal convolution in Triton over tiles of a prompt: one program per tile of a row's
tokens and of channels, since no token waits for another's result. The program of a row's first
tile, which alone reads the row's state, writes what becomes of it. Decode and drafts:
triton_causal_conv.py.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.causal_conv.op import (
    OP,
    CausalConv,
    CausalConvProblem,
    check_weights,
    long_sample,
)
from headrace.back.kernels.causal_conv.triton_causal_conv import bind as bind_tokens
from headrace.back.kernels.causal_conv.triton_causal_conv import input_at, supports
from headrace.back.kernels.gated_delta.triton_chunk_products import row_of_chunk
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import row_tokens
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch

TOKENS = 16
TILE = 128


@triton.jit(do_not_specialize=["states", "count"])
def causal_conv_tiles_kernel(
    x,
    weight,
    bias,
    y,
    state,
    rows,
    start,
    states,
    count,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    i_s = tl.program_id(0)
    i_r = row_of_chunk(start, count, i_s, C)
    row, first, last = row_tokens(rows, start, states, i_r)
    begin = first + (i_s - first // C - i_r) * C
    if begin < last:
        BEFORE: tl.constexpr = TAPS - 1
        o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        m_c = o_c < CHANNELS
        t = begin + tl.arange(0, C)[:, None]
        m_tc = (t < last) & m_c[None, :]
        p_state = state + row * state_stride + o_c
        b_y = tl.zeros([C, BLOCK], tl.float32)
        if BIAS:
            b_y += tl.load(bias + o_c, mask=m_c, other=0.0)[None, :]
        for j in tl.static_range(TAPS):
            at = t - BEFORE + j
            b_x = input_at(
                x, p_state[None, :], at, first, x_stride, o_c[None, :], m_tc, BEFORE, CHANNELS
            )
            b_weight = tl.load(weight + j * CHANNELS + o_c, mask=m_c, other=0.0)
            b_y += b_x.to(tl.float32) * b_weight[None, :]
        if SILU:
            b_y *= tl.sigmoid(b_y)
        tl.store(y + t * CHANNELS + o_c[None, :], b_y.to(y.dtype.element_ty), mask=m_tc)
        if begin == first:
            tl.debug_barrier()  # what other threads have read of the state goes now
            for j in tl.static_range(BEFORE):  # upwards: what is read lies at or above
                b_last = input_at(
                    x, p_state, last - BEFORE + j, first, x_stride, o_c, m_c, BEFORE, CHANNELS
                )
                tl.store(p_state + j * CHANNELS, b_last, mask=m_c)


def bind(
    problem: CausalConvProblem, weight_WC: torch.Tensor, bias_C: torch.Tensor | None
) -> CausalConv:
    """The kernels for one number of channels and taps."""
    check_weights(problem, weight_WC, bias_C)
    weight_WC = weight_WC.contiguous()
    by_tokens = bind_tokens(problem, weight_WC, bias_C)
    taps, channels = weight_WC.shape

    def causal_conv(x_TC: torch.Tensor, state_MWC: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        if rows.decode or rows.trail is not None:
            return by_tokens(x_TC, state_MWC, rows)
        assert x_TC.stride(1) == 1 and state_MWC.stride()[1:] == (channels, 1), state_MWC.stride()
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        count = rows.row_R.shape[0]
        grid = x_TC.shape[0] // TOKENS + count, triton.cdiv(channels, TILE)
        causal_conv_tiles_kernel[grid](
            x_TC, weight_WC, bias_C, y_TC, state_MWC, rows.row_R, rows.query_start_R1,
            rows.padding(state_MWC), count, x_TC.stride(0), state_MWC.stride(0), CHANNELS=channels,
            TAPS=taps, SILU=problem.activation == "silu", BIAS=problem.bias, BLOCK=TILE, C=TOKENS,
            num_warps=4, **launch(x_TC.device),
        )  # fmt: skip
        return y_TC

    return causal_conv


def _plans(problem: CausalConvProblem) -> list[PlanCheck]:
    return [
        PlanCheck(name="tokens", sample=partial(OP.sample, problem), bind=bind),
        PlanCheck(name="tiles", sample=partial(long_sample, problem), bind=bind),
    ]


KERNEL = Kernel(name="triton tiles", supports=supports, bind=bind, plans=_plans)
