"""A short causal convolution in Triton: one program per row of the step and tile of channels.
The taps are loaded anew for each token: they lie in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.causal_conv.op import CausalConv, CausalConvProblem, check_weights
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.gated_scan.triton_gated_scan import behind, row_tokens
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 256
MAX_TAPS = 8


@triton.jit
def input_at(
    x, p_state, t, first, x_stride, o_c, m_c, BEFORE: tl.constexpr, CHANNELS: tl.constexpr
):
    """The input at token t, which may lie before the row's first."""
    inside = t >= first
    b_x = tl.load(x + t * x_stride + o_c, mask=m_c & inside, other=0.0)
    p_past = p_state + (BEFORE + t - first) * CHANNELS
    b_past = tl.load(p_past, mask=m_c & (t < first), other=0.0)
    return tl.where(inside, b_x, b_past)


@triton.jit(do_not_specialize=["states"])
def causal_conv_kernel(
    x,
    weight,
    bias,
    y,
    state,
    rows,
    start,
    states,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row, first, last = row_tokens(rows, start, states, tl.program_id(0))
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = (o_c < CHANNELS) & (first < last)
    BEFORE: tl.constexpr = TAPS - 1
    p_state = state + row * state_stride + o_c
    for t in range(first, last):
        b_y = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            b_y += tl.load(bias + o_c, mask=m_c, other=0.0)
        for j in tl.static_range(TAPS):
            b_x = input_at(x, p_state, t - BEFORE + j, first, x_stride, o_c, m_c, BEFORE, CHANNELS)
            b_weight = tl.load(weight + j * CHANNELS + o_c, mask=m_c, other=0.0)
            b_y += b_x.to(tl.float32) * b_weight
        if SILU:
            b_y *= tl.sigmoid(b_y)
        p_y = y + t * CHANNELS + o_c
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_c)
    end = last
    if DEPTH:  # the row's own state last: the others read it
        for t in range(first + 1, last):
            kept = behind(row, t, first, states, tl.program_id(0), DEPTH)
            p_kept = state + kept * state_stride + o_c
            for j in tl.static_range(BEFORE):
                at = t + 1 - BEFORE + j
                b_x = input_at(x, p_state, at, first, x_stride, o_c, m_c, BEFORE, CHANNELS)
                tl.store(p_kept + j * CHANNELS, b_x, mask=m_c)
        end = tl.minimum(last, first + 1)
    for j in tl.static_range(BEFORE):  # upwards: what is read lies at or above what is written
        b_x = input_at(x, p_state, end - BEFORE + j, first, x_stride, o_c, m_c, BEFORE, CHANNELS)
        tl.store(p_state + j * CHANNELS, b_x, mask=m_c)


def bind(
    problem: CausalConvProblem, weight_WC: torch.Tensor, bias_C: torch.Tensor | None
) -> CausalConv:
    """The kernel for one number of channels and taps."""
    check_weights(problem, weight_WC, bias_C)
    weight_WC = weight_WC.contiguous()
    taps, channels = weight_WC.shape

    def causal_conv(x_TC: torch.Tensor, state_MWC: torch.Tensor, rows: ScanRows) -> torch.Tensor:
        assert x_TC.stride(1) == 1 and state_MWC.stride()[1:] == (channels, 1), state_MWC.stride()
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        causal_conv_kernel[(rows.row_R.shape[0], triton.cdiv(channels, TILE))](
            x_TC, weight_WC, bias_C, y_TC, state_MWC, rows.row_R, rows.query_start_R1,
            rows.padding(state_MWC), x_TC.stride(0), state_MWC.stride(0), CHANNELS=channels,
            TAPS=taps, SILU=problem.activation == "silu", BIAS=problem.bias, BLOCK=TILE,
            DEPTH=rows.depth, num_warps=4, **launch(x_TC.device),
        )  # fmt: skip
        return y_TC

    return causal_conv


def supports(problem: CausalConvProblem) -> str | None:
    if not 2 <= problem.taps <= MAX_TAPS:
        return f"has 2 to {MAX_TAPS} taps, not {problem.taps}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=supports, bind=bind, invariant=True)
