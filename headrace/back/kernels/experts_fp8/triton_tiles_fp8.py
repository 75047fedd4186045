"""Grouped GEMMs of e4m3 by e4m3 by tl.dot: over the sorted and quantized rows of
experts/triton_dispatch.py, a tile of M rows and 128 results of one expert at a time. The first GEMM
leaves inner values as e4m3 numbers, too: 128 results of a row are a group.

Sums of 128 inputs are added in float32 with the scales of both (linear/triton_scaled_gemm.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.experts.op import OAI_ALPHA, ExpertsProblem
from headrace.back.kernels.experts.triton_dispatch import quantized
from headrace.back.kernels.experts.triton_experts import activation_constants, gated, tile_at
from headrace.back.kernels.experts_fp8.layout import GROUP, ScaledMatrices, num_groups
from headrace.back.kernels.linear.scaled_rows import FLOAT8, ScaledRows
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import interpreted, launch, num_sms

N = 128
PROGRAMS_PER_SM = 2


@triton.jit
def grouped_fp8_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    tiles,
    y,
    y_scales,
    fixed,
    clamp,
    alpha,
    INPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
    GROUPED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    OAI: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: any. Of sorted rows x [., INPUTS] with scales [., INPUTS / K]; if GATED an expert has
    twice as many rows as RESULTS, gates first, and y are e4m3 numbers with y_scales [., RESULTS /
    N], all of them `fixed` [1] where it is not None. GROUPED: weights have scales of K inputs, else
    of all."""
    enter(DEPENDENT)
    COLUMNS: tl.constexpr = (RESULTS + N - 1) // N
    GROUPS: tl.constexpr = (INPUTS + K - 1) // K
    ROWS: tl.constexpr = 2 * RESULTS if GATED else RESULTS
    o_k = tl.arange(0, K)
    for i_work in range(tl.program_id(0), tl.load(tiles) * COLUMNS, tl.num_programs(0)):
        i_x, m_m, o_row, o_n, m_n = tile_at(tiles, i_work, COLUMNS, RESULTS, M, N)
        p_x = x + o_row[:, None] * INPUTS + o_k[None, :]
        p_w = weight + (i_x * ROWS + o_n)[:, None] * INPUTS + o_k[None, :]
        p_s = scales + i_x * ((GROUPS if GROUPED else 1) * ROWS) + o_n
        b_acc = tl.zeros([N, M], tl.float32)
        b_up = tl.zeros([N, M], tl.float32)
        for i in range(0, GROUPS):
            m_k = (i * K + o_k < INPUTS)[None, :]
            b_x = tl.load(p_x + i * K, mask=m_m[:, None] & m_k, other=0.0)
            b_xs = tl.load(x_scales + o_row * GROUPS + i, mask=m_m, other=0.0)[None, :]
            b_w = tl.load(p_w + i * K, mask=m_n[:, None] & m_k, other=0.0)
            b_part = tl.dot(b_w, tl.trans(b_x), out_dtype=tl.float32) * b_xs
            if GROUPED:
                b_part *= tl.load(p_s + i * ROWS, mask=m_n, other=0.0)[:, None]
            b_acc += b_part
            if GATED:
                b_w = tl.load(p_w + RESULTS * INPUTS + i * K, mask=m_n[:, None] & m_k, other=0.0)
                b_part = tl.dot(b_w, tl.trans(b_x), out_dtype=tl.float32) * b_xs
                if GROUPED:
                    b_part *= tl.load(p_s + i * ROWS + RESULTS, mask=m_n, other=0.0)[:, None]
                b_up += b_part
        if not GROUPED:
            b_acc *= tl.load(p_s, mask=m_n, other=0.0)[:, None]
            if GATED:
                b_up *= tl.load(p_s + RESULTS, mask=m_n, other=0.0)[:, None]
        if BIAS:
            p_bias = bias + i_x * ROWS + o_n
            b_acc += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                b_up += tl.load(p_bias + RESULTS, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_y = y + o_row[None, :] * RESULTS + o_n[:, None]
        if GATED:
            b_acc = gated(b_acc, b_up, clamp, alpha, ACTIVATION, CLAMP, OAI)
            b_acc, b_scale = quantized(tl.trans(tl.where(m_n[:, None], b_acc, 0.0)), fixed, N)
            b_acc = tl.trans(b_acc)
            p_scale = y_scales + o_row[:, None] * COLUMNS + i_work % COLUMNS + tl.arange(0, 1)
            tl.store(p_scale, b_scale, mask=m_m[:, None])
        tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


def multiply(
    problem: ExpertsProblem,
    x: ScaledRows,
    weight: ScaledMatrices,
    bias_XO: torch.Tensor | None,
    tiles: torch.Tensor,
    *,
    m: int,
    is_gated: bool,
    scale_1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches it over tiles of `m` rows: y [., results] and its scales, which are those of
    quantized numbers if it is gated; `scale_1`: that of all of these."""
    x_NI, x_scales = x
    results = weight.values_XOI.shape[1] // (2 if is_gated else 1)
    # The interpreter does not round to the nearest e4m3 number: there torch does.
    dtype = FLOAT8 if not interpreted() else torch.float32
    y_NO = torch.empty(
        len(x_NI), results, dtype=dtype if is_gated else problem.dtype, device=x_NI.device
    )
    y_scales = x_scales
    if is_gated:
        y_scales = x_scales.new_empty(len(x_NI), num_groups(results, GROUP))
    stage = (m + N * (2 if is_gated else 1)) * GROUP
    grouped_fp8_kernel[(num_sms(x_NI.device) * PROGRAMS_PER_SM,)](
        x_NI, x_scales, weight.values_XOI, weight.scales_XGO, bias_XO, tiles, y_NO, y_scales,
        scale_1, problem.clamp, OAI_ALPHA, INPUTS=x_NI.shape[1], RESULTS=results,
        GROUPED=weight.group is not None, M=m, N=N, K=GROUP, GATED=is_gated,
        **activation_constants(problem), BIAS=bias_XO is not None, num_warps=4 if m < 64 else 8,
        num_stages=fitting_stages(4, stage), **launch(x_NI.device),
    )  # fmt: skip
    return y_NO.to(FLOAT8) if is_gated else y_NO, y_scales
