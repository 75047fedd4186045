"""A GEMM of tokens and a weight of a byte a number, e4m3 by e4m3 or int8 by int8, for many tokens:
what the library does not serve.

The sums of a group's inputs are taken by the tensor cores. Their accumulators keep fewer bits for
e4m3 numbers, so these are added in float32 at least every K inputs (DeepSeek-V3, 3.3.2); integers
are summed exactly within a group. Tiles of tokens take turns in groups, so that those of a group
find the weight in the second-level cache.

T tokens, I inputs, O outputs; a program takes M tokens and N outputs in steps of K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.back.kernels.linear.scaled_rows import ScaledRows
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import launch

K = 128


@dataclass(frozen=True)
class ScaledGemmPlan:
    """M tokens and N outputs of a program; tiles of tokens that take turns."""

    m: int
    n: int
    warps: int
    stages: int
    turns: int


WIDE = ScaledGemmPlan(m=128, n=128, warps=8, stages=3, turns=16)
"""Two programs a multiprocessor: int8 at 1,270 TOP/s on an H200, 920 by one of four stages."""
FEW = ScaledGemmPlan(m=64, n=128, warps=4, stages=4, turns=8)
"""Where WIDE has less than a program for each of FEW_PROGRAMS."""
GROUPED = ScaledGemmPlan(m=128, n=64, warps=4, stages=4, turns=8)
"""A group's sums become floats: 620 where 128 outputs give 460."""
FEW_PROGRAMS = 264


def tiles_of(tokens: int, outputs: int, groups: int) -> ScaledGemmPlan:
    """The best of those that benchmarks/lab/scaled_gemm.py tries."""
    if groups > 1:
        return GROUPED
    programs = triton.cdiv(tokens, WIDE.m) * triton.cdiv(outputs, WIDE.n)
    return FEW if programs < FEW_PROGRAMS else WIDE


@triton.jit(do_not_specialize=["num_tokens"])
def scaled_gemm_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    num_tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUPS: tl.constexpr,
    INTEGERS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TURNS: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """GROUP inputs of the weight share a scale: a multiple of K, or all. X_GROUPS: of x as many,
    or 1."""
    TILES: tl.constexpr = (OUTPUTS + N - 1) // N
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    i_program = tl.program_id(0)
    i_turn = i_program // (TILES * TURNS)
    turns = tl.minimum((num_tokens + M - 1) // M - i_turn * TURNS, TURNS)
    i_inner = i_program - i_turn * (TILES * TURNS)
    o_m = (i_turn * TURNS + i_inner % turns) * M + tl.arange(0, M)
    o_n = i_inner // turns * N + tl.arange(0, N)
    o_k = tl.arange(0, K)
    m_m = o_m < num_tokens
    m_n = o_n < OUTPUTS
    o_row = tl.where(m_n, o_n, 0)
    o_token = tl.where(m_m, o_m, 0)
    p_weight = weight + o_row.to(tl.int64)[:, None] * INPUTS + o_k[None, :]
    p_x = x + o_token.to(tl.int64)[:, None] * INPUTS + o_k[None, :]
    enter(DEPENDENT)
    SUMS: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    TOTAL: tl.constexpr = tl.int32 if INTEGERS and GROUPS == 1 else tl.float32
    b_acc = tl.zeros([M, N], TOTAL)
    for k in range(0, INPUTS, K):
        if INPUTS % K:
            m_k = (k + o_k < INPUTS)[None, :]
            b_x = tl.load(p_x + k, mask=m_k, other=0.0)
            b_weight = tl.load(p_weight + k, mask=m_k, other=0.0)
        else:
            b_x = tl.load(p_x + k)
            b_weight = tl.load(p_weight + k)
        b_part = tl.dot(b_x, tl.trans(b_weight), out_dtype=SUMS)
        if GROUPS > 1:
            b_scale = tl.load(scales + o_row * GROUPS + k // GROUP)
            b_part = b_part.to(tl.float32) * b_scale[None, :]
            if X_GROUPS > 1:
                b_part *= tl.load(x_scales + o_token * X_GROUPS + k // GROUP)[:, None]
        b_acc += b_part
    b_acc = b_acc.to(tl.float32)
    if GROUPS == 1:
        b_acc = b_acc * tl.load(scales + o_row)[None, :]
    if X_GROUPS == 1:
        b_acc = b_acc * tl.load(x_scales + o_token)[:, None]
    if BIAS:
        b_acc += tl.load(bias + o_row).to(tl.float32)[None, :]
    p_y = y + o_m.to(tl.int64)[:, None] * OUTPUTS + o_n[None, :]
    tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def multiply(
    rows: ScaledRows,
    values_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    group: int | None,
    bias_O: torch.Tensor | None,
    y_TO: torch.Tensor,
) -> None:
    """Writes y, which is dense. `group` inputs of the weight share a scale, None: all; of the rows
    as many, or all."""
    assert y_TO.is_contiguous() and rows.values_TI.is_contiguous() and values_OI.is_contiguous()
    tokens, (outputs, inputs) = len(y_TO), values_OI.shape
    tiles = tiles_of(tokens, outputs, scales_OG.shape[1])
    k = min(K, group or K)
    scaled_gemm_kernel[(triton.cdiv(tokens, tiles.m) * triton.cdiv(outputs, tiles.n),)](
        rows.values_TI, rows.scales_TG, values_OI, scales_OG, bias_O, y_TO, tokens,
        INPUTS=inputs, OUTPUTS=outputs, GROUP=group or inputs, X_GROUPS=rows.scales_TG.shape[1],
        INTEGERS=values_OI.dtype is torch.int8, M=tiles.m, N=tiles.n, K=k, TURNS=tiles.turns,
        BIAS=bias_O is not None, num_warps=tiles.warps,
        num_stages=fitting_stages(tiles.stages, (tiles.m + tiles.n) * k), **launch(y_TO.device),
    )  # fmt: skip
