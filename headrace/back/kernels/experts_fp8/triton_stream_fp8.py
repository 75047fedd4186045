"""A grouped GEMM of e4m3 by e4m3 on Hopper whose experts have few rows each: bound by reading each
weight once. As experts/triton_grouped_stream.py, with numbers of a byte, so that a step has twice
as many of the weight's rows: persistent programs keep STAGES steps of the TMA unit on their way,
across the ends of tiles.

Sums of 128 inputs are added in float32 with the scales of both. The first GEMM leaves inner values
as e4m3 numbers: an item's 128 results of a row are a group. The second asks for weights before the
first has ended: the list it reads was written before that one began, which lets it start only after
its own wait.

N sorted rows, I inputs, O results of an expert; ROWS weight rows of a box, of which an item has
two: gates and ups, or twice as many results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.back.kernels.experts.gluon_gated import gated
from headrace.back.kernels.experts.op import OAI_ALPHA, SWIGLU_OAI, ExpertsProblem
from headrace.back.kernels.experts_fp8.layout import GROUP, ScaledMatrices, num_groups
from headrace.back.kernels.linear.scaled_rows import FLOAT8, ScaledRows
from headrace.back.kernels.triton.gluon import enter_late, thread_barrier
from headrace.back.kernels.triton.wrap import launch, num_sms

ROWS = gl.constexpr(128)
K = gl.constexpr(128)
ROOM = {16: (100 << 10, 2), 32: (100 << 10, 2), 64: (200 << 10, 1)}
"""Rows of a tile -> bytes of shared memory for steps on their way, programs of a multiprocessor.
Qwen3-30B-A3B on an H200: 32 tokens take 141 us by two small programs, 147 by one, 256 tokens 176
and 182 (benchmarks/lab/fp8_experts.py)."""


@gluon.jit
def _ask_weights(
    weight, tiles, unit, slot, weights, ready, i_program, num_programs, EXPECTED: gl.constexpr,
    COLUMNS: gl.constexpr, STEPS: gl.constexpr, EXPERT_ROWS: gl.constexpr, APART: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Asks for a unit's weights; EXPECTED counts its rows, too."""
    item = i_program + unit // STEPS * num_programs
    first = gl.load(tiles + 1 + item // COLUMNS * 2) * EXPERT_ROWS + item % COLUMNS * PART
    one = ready.index(slot)
    column = unit % STEPS * K
    mbarrier.expect(one, EXPECTED)
    tma.async_copy_global_to_shared(weight, [first, column], one, weights.index(slot * 2))
    tma.async_copy_global_to_shared(
        weight, [first + APART, column], one, weights.index(slot * 2 + 1)
    )


@gluon.jit
def _ask_rows(
    x, unit, slot, rows, ready, i_program, num_programs, COLUMNS: gl.constexpr, STEPS: gl.constexpr
):
    """Asks for its rows."""
    M: gl.constexpr = x.block_shape[0]
    item = i_program + unit // STEPS * num_programs
    place = [item // COLUMNS * M, unit % STEPS * K]
    tma.async_copy_global_to_shared(x, place, ready.index(slot), rows.index(slot))


@gluon.jit
def _row_scales(
    x_scales, unit, i_program, num_programs, o_m, COLUMNS: gl.constexpr, STEPS: gl.constexpr,
    M: gl.constexpr,
):  # fmt: skip
    """Of a unit's rows [M]."""
    item = i_program + unit // STEPS * num_programs
    o_row = item // COLUMNS * M + o_m
    return gl.load(x_scales + o_row.to(gl.int64) * STEPS + unit % STEPS)


@gluon.jit
def _weight_scales(
    scales, tiles, unit, i_program, num_programs, o_n, more: gl.constexpr, GROUPED: gl.constexpr,
    COLUMNS: gl.constexpr, STEPS: gl.constexpr, EXPERT_ROWS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Of a unit's outputs [ROWS], `more` behind the first."""
    item = i_program + unit // STEPS * num_programs
    place = gl.load(tiles + 1 + item // COLUMNS * 2)
    if GROUPED:
        place = place * STEPS + unit % STEPS
    o_out = item % COLUMNS * PART + more + o_n
    p_scale = scales + place.to(gl.int64) * EXPERT_ROWS + o_out
    return gl.load(p_scale, mask=o_out < EXPERT_ROWS, other=0.0)


@gluon.jit
def grouped_stream_fp8_kernel(
    weight,
    scales,
    x,
    x_scales,
    bias,
    tiles,
    y,
    y_scales,
    fixed,
    clamp,
    alpha,
    RESULTS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPED: gl.constexpr,
    GATED: gl.constexpr,
    CLAMP: gl.constexpr,
    OAI: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """`weight` [X O, I], `x` [N, I]: descriptors in blocks [ROWS, K] and [M, K]; x_scales [N,
    STEPS]; y [N, RESULTS]. If GATED an expert has twice as many weight rows as results, gates
    first, and y are e4m3 numbers with y_scales [N, RESULTS / ROWS], all of
    them `fixed` [1] where it is not None. GROUPED: `scales` [X, STEPS,
    O], else [X, O]."""
    M: gl.constexpr = x.block_shape[0]
    PART: gl.constexpr = ROWS if GATED else 2 * ROWS
    APART: gl.constexpr = RESULTS if GATED else ROWS
    EXPERT_ROWS: gl.constexpr = 2 * RESULTS if GATED else RESULTS
    COLUMNS: gl.constexpr = (RESULTS + PART - 1) // PART
    EXPECTED: gl.constexpr = (2 * ROWS + M) * K
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * 2, ROWS, K], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, M, K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    if GATED:
        enter_late(DEPENDENT)
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    items = gl.load(tiles) * COLUMNS
    own = gl.maximum(items - i_program + num_programs - 1, 0) // num_programs
    end = own * STEPS
    for stage in gl.static_range(STAGES):
        if stage < end:
            _ask_weights(
                weight, tiles, stage, stage, weights, ready, i_program, num_programs, EXPECTED,
                COLUMNS, STEPS, EXPERT_ROWS, APART, PART,
            )  # fmt: skip
    if not GATED:
        enter_late(DEPENDENT)
    for stage in gl.static_range(STAGES):
        if stage < end:
            _ask_rows(x, stage, stage, rows, ready, i_program, num_programs, COLUMNS, STEPS)
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    o_column = gl.arange(0, M, layout=gl.SliceLayout(0, ACC))
    for i_item in range(0, own):
        item = i_program + i_item * num_programs
        b_first = gl.zeros([ROWS, M], gl.float32, ACC)
        b_second = gl.zeros([ROWS, M], gl.float32, ACC)
        b_zero = gl.zeros([ROWS, M], gl.float32, ACC)
        for unit in range(i_item * STEPS, i_item * STEPS + STEPS):
            slot = unit % STAGES
            b_xs = _row_scales(x_scales, unit, i_program, num_programs, o_column, COLUMNS, STEPS, M)
            if GROUPED:
                b_s = _weight_scales(
                    scales, tiles, unit, i_program, num_programs, o_row, 0, GROUPED, COLUMNS, STEPS,
                    EXPERT_ROWS, PART,
                )  # fmt: skip
                b_t = _weight_scales(
                    scales, tiles, unit, i_program, num_programs, o_row, APART, GROUPED, COLUMNS,
                    STEPS, EXPERT_ROWS, PART,
                )  # fmt: skip
            mbarrier.wait(ready.index(slot), unit // STAGES & 1)
            b_x = rows.index(slot).permute((1, 0))
            b_one = warpgroup_mma(
                weights.index(slot * 2), b_x, b_zero, use_acc=False, is_async=True
            )
            b_two = warpgroup_mma(
                weights.index(slot * 2 + 1), b_x, b_zero, use_acc=False, is_async=True
            )
            b_one, b_two = warpgroup_mma_wait(0, deps=[b_one, b_two])
            thread_barrier()
            if unit + STAGES < end:
                _ask_weights(
                    weight, tiles, unit + STAGES, slot, weights, ready, i_program, num_programs,
                    EXPECTED, COLUMNS, STEPS, EXPERT_ROWS, APART, PART,
                )  # fmt: skip
                _ask_rows(
                    x, unit + STAGES, slot, rows, ready, i_program, num_programs, COLUMNS, STEPS
                )
            if GROUPED:
                b_first += b_one * (b_s[:, None] * b_xs[None, :])
                b_second += b_two * (b_t[:, None] * b_xs[None, :])
            else:
                b_first += b_one * b_xs[None, :]
                b_second += b_two * b_xs[None, :]
        if not GROUPED:
            unit = i_item * STEPS
            b_s = _weight_scales(
                scales, tiles, unit, i_program, num_programs, o_row, 0, GROUPED, COLUMNS, STEPS,
                EXPERT_ROWS, PART,
            )  # fmt: skip
            b_t = _weight_scales(
                scales, tiles, unit, i_program, num_programs, o_row, APART, GROUPED, COLUMNS, STEPS,
                EXPERT_ROWS, PART,
            )  # fmt: skip
            b_first = b_first * b_s[:, None]
            b_second = b_second * b_t[:, None]
        i_list = item // COLUMNS
        i_expert = gl.load(tiles + 1 + 2 * i_list)
        o_result = item % COLUMNS * PART + o_row
        m_first = o_result < RESULTS
        m_second = o_result + (0 if GATED else ROWS) < RESULTS
        if BIAS:
            p_bias = bias + i_expert * EXPERT_ROWS + o_result
            b_first += gl.load(p_bias, mask=m_first, other=0.0).to(gl.float32)[:, None]
            b_second += gl.load(p_bias + APART, mask=m_second, other=0.0).to(gl.float32)[:, None]
        if GATED:
            b_h = gated(b_first, b_second, clamp, alpha, CLAMP, OAI)
            b_h = gl.where(m_first[:, None], b_h, 0.0)
            b_top = gl.max(gl.abs(b_h), axis=0)
            if fixed is not None:
                b_top = b_top * 0.0 + gl.load(fixed) * 448.0
            b_inverse = gl.where(b_top > 1e-30, gl.div_rn(448.0, gl.maximum(b_top, 1e-30)), 0.0)
            b_values = gl.minimum(gl.maximum(b_h * b_inverse[None, :], -448.0), 448.0)
            b_first = gl.where(b_h == b_h, b_values, b_h)  # a NaN stays one
            o_scaled = (i_list * M + o_column).to(gl.int64) * COLUMNS + item % COLUMNS
            gl.store(y_scales + o_scaled, gl.div_rn(b_top, 448.0))
        o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        o_m = gl.arange(0, M, layout=gl.SliceLayout(0, OUT))
        o_out = item % COLUMNS * PART + o_n
        p_y = y + (i_list * M + o_m)[None, :].to(gl.int64) * RESULTS + o_out[:, None]
        b_y = gl.convert_layout(b_first, OUT).to(y.dtype.element_ty)
        gl.store(p_y, b_y, mask=(o_out < RESULTS)[:, None])
        if not GATED:
            b_y = gl.convert_layout(b_second, OUT).to(y.dtype.element_ty)
            gl.store(p_y + ROWS, b_y, mask=(o_out + ROWS < RESULTS)[:, None])


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
    """As triton_tiles_fp8.multiply."""
    x_NI, x_scales = x
    device, (rows_of_one, inputs) = x_NI.device, weight.values_XOI.shape[1:]
    results = rows_of_one // (2 if is_gated else 1)
    y_NO = torch.empty(
        len(x_NI), results, dtype=FLOAT8 if is_gated else problem.dtype, device=device
    )
    y_scales = x_scales
    if is_gated:
        y_scales = x_scales.new_empty(len(x_NI), num_groups(results, GROUP))
    warps = 8 if m > 32 else 4
    stream_bytes, programs = ROOM[m]
    grouped_stream_fp8_kernel[(num_sms(device) * programs,)](
        _described(weight.values_XOI.flatten(0, 1), ROWS.value), weight.scales_XGO,
        _described(x_NI, m), x_scales, bias_XO, tiles, y_NO, y_scales, scale_1, problem.clamp, OAI_ALPHA,
        RESULTS=results, STEPS=triton.cdiv(inputs, K.value),
        STAGES=stream_bytes // ((2 * ROWS.value + m) * K.value), GROUPED=weight.group is not None,
        GATED=is_gated, CLAMP=problem.clamp > 0, OAI=problem.activation == SWIGLU_OAI,
        BIAS=bias_XO is not None, WARPS=warps, num_warps=warps, **launch(device),
    )  # fmt: skip
    return y_NO, y_scales


def _described(tensor: torch.Tensor, rows: int) -> Any:
    """The TMA unit's descriptor of a matrix in boxes of so many rows."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, K.value], gl.float8e4nv)
    return TensorDescriptor.from_tensor(tensor, [rows, K.value], layout)
