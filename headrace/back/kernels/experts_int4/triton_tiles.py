"""Grouped GEMMs with weights of 4-bit numbers by tl.dot on any GPU: over the sorted rows of
experts/triton_dispatch.py, a tile of M rows and 64 results of one expert at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.experts.op import OAI_ALPHA, ExpertsProblem
from headrace.back.kernels.experts.triton_experts import activation_constants, gated, tile_at
from headrace.back.kernels.linear_int4.layout import BLOCK, Int4Weight, block_groups
from headrace.back.kernels.linear_int4.triton_tiles_int4 import block_of
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import launch, num_sms

PROGRAMS_PER_SM = 3


@triton.jit
def grouped_int4_kernel(
    x,
    words,
    scales,
    bias,
    tiles,
    y,
    clamp,
    alpha,
    INPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    MINIMA: tl.constexpr,
    FLOATS: tl.constexpr,
    M: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    OAI: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: any. y [., RESULTS] of the sorted rows x [., INPUTS]; if GATED an expert has twice as
    many matrices, gates first. STEPS: blocks of 128 inputs."""
    enter(DEPENDENT)
    S: tl.constexpr = GROUPS * (128 if MINIMA else 64)
    COLUMNS: tl.constexpr = (RESULTS + 63) // 64
    MATRICES: tl.constexpr = 2 if GATED else 1
    NEXT: tl.constexpr = 0 if WHOLE else S
    ROW: tl.constexpr = S if WHOLE else STEPS * S
    o_k = tl.arange(0, 128)
    for i_work in range(tl.program_id(0), tl.load(tiles) * COLUMNS, tl.num_programs(0)):
        i_x, m_m, o_row, o_n, m_n = tile_at(tiles, i_work, COLUMNS, RESULTS, M, 64)
        i_tile = i_x * (MATRICES * COLUMNS) + i_work % COLUMNS
        p_words = words + i_tile * (STEPS * 1024)
        p_scales = scales + i_tile * ROW
        p_x = x + o_row[:, None] * INPUTS + o_k[None, :]
        b_acc = tl.zeros([64, M], tl.float32)
        b_up = tl.zeros([64, M], tl.float32)
        for i in range(0, STEPS):
            m_k = i * 128 + o_k < INPUTS
            b_x = tl.load(p_x + i * 128, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = block_of(p_words + i * 1024, p_scales + i * NEXT, GROUPS, MINIMA, FLOATS)
            b_acc = tl.dot(b_w.to(b_x.dtype), tl.trans(b_x), b_acc, input_precision="ieee")
            if GATED:
                p_more = p_words + (COLUMNS * STEPS + i) * 1024
                b_w = block_of(p_more, p_scales + COLUMNS * ROW + i * NEXT, GROUPS, MINIMA, FLOATS)
                b_up = tl.dot(b_w.to(b_x.dtype), tl.trans(b_x), b_up, input_precision="ieee")
        if BIAS:
            p_bias = bias + i_x * (MATRICES * RESULTS) + o_n
            b_acc += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                b_up += tl.load(p_bias + RESULTS, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            b_acc = gated(b_acc, b_up, clamp, alpha, ACTIVATION, CLAMP, OAI)
        p_y = y + o_row[None, :] * RESULTS + o_n[:, None]
        tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


def multiply(
    problem: ExpertsProblem,
    x_NI: torch.Tensor,
    weight: Int4Weight,
    bias_XO: torch.Tensor | None,
    tiles: torch.Tensor,
    y_NO: torch.Tensor,
    *,
    m: int,
    is_gated: bool,
) -> None:
    """Launches it over tiles of `m` rows."""
    rows = 128 if is_gated else 64
    grouped_int4_kernel[(num_sms(x_NI.device) * PROGRAMS_PER_SM,)](
        x_NI, weight.words_NBW, weight.scales_NBSR, bias_XO, tiles, y_NO, problem.clamp, OAI_ALPHA,
        INPUTS=weight.inputs, RESULTS=y_NO.shape[1], STEPS=weight.words_NBW.shape[1],
        GROUPS=block_groups(weight.group), WHOLE=weight.group is None, MINIMA=weight.minima,
        FLOATS=weight.floats, M=m, GATED=is_gated, **activation_constants(problem),
        BIAS=bias_XO is not None, num_warps=4,
        num_stages=fitting_stages(3, (m + rows) * BLOCK * x_NI.element_size()),
        **launch(x_NI.device),
    )  # fmt: skip
