"""A GEMM with up to 64 tokens through tl.dot, bound by reading the weight once.

A program takes N outputs and a share of the inputs; with SPLIT shares the program that comes last
adds them up, in their order, so the result does not depend on who that is. The weight's first tiles
are asked for (into the second-level cache) before the kernel waits for the one before it. After the
GEMM, as in kernels/fused_linear: a gated activation, an addition into the residual. A norm of x is
a kernel of its own before this one: here it would stand between the loads and the tensor cores
(H200, 6144x4096, 8 tokens: 41 us instead of 16).

T tokens (M padded, at least 16), I inputs, O outputs, N outputs of a program, K inputs of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.triton.grid import prefetch


@triton.jit
def prefetch_rows(p_first, o_row, INPUTS: tl.constexpr, COUNT: tl.constexpr):
    """Asks for the first COUNT values (a power of two) of the weight's rows."""
    LINE: tl.constexpr = 1024 // p_first.dtype.element_ty.primitive_bitwidth
    o_line = tl.arange(0, COUNT // LINE) * LINE
    prefetch(p_first + o_row.to(tl.int64)[:, None] * INPUTS + o_line[None, :])


@triton.jit
def floats(b_weight):
    """A weight's numbers in float32, exactly. Integers of a byte become the low bits of a float
    from 2^23 on, where steps are of 1, and lose that again: two instructions of full rate, where
    conversions of integers have a fraction of it."""
    if b_weight.dtype == tl.int8:
        b_bits = b_weight.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
        return b_bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        return b_weight.to(tl.float32)


@triton.jit
def _times(b_x, b_weight, b_acc, SWAP: tl.constexpr):
    """Adds x W^T; its transpose W x^T if SWAP. A weight of bytes becomes the type of x in
    registers."""
    b_weight = b_weight.to(b_x.dtype)
    if SWAP:
        return tl.dot(b_weight, tl.trans(b_x), b_acc, input_precision="ieee")
    else:
        return tl.dot(b_x, tl.trans(b_weight), b_acc, input_precision="ieee")


@triton.jit
def _scaled(
    b_weight, p_scale, p_minimum, m_scale, dtype: tl.constexpr, GROUP: tl.constexpr,
    MINIMA: tl.constexpr,
):  # fmt: skip
    """The weights of a step of several groups: values times the scales [N, groups] of their groups,
    less their minima."""
    COUNT: tl.constexpr = b_weight.shape[1] // GROUP
    b_groups = tl.reshape(floats(b_weight), [b_weight.shape[0], COUNT, GROUP])
    b_groups = b_groups * tl.load(p_scale, mask=m_scale, other=0.0)[:, :, None]
    if MINIMA:
        b_groups -= tl.load(p_minimum, mask=m_scale, other=0.0)[:, :, None]
    return tl.reshape(b_groups, b_weight.shape).to(dtype)


@triton.jit
def _times_scaled(
    b_x, b_weight, b_acc, b_scale, p_minimum, m_scale, b_x_scale, SWAP: tl.constexpr,
    MINIMA: tl.constexpr,
):  # fmt: skip
    """Adds the same times a scale for each output (and `b_x_scale` for each token, if there are
    some), less the sum of x times its minimum."""
    b_part = _times(b_x, b_weight, tl.zeros_like(b_acc), SWAP)
    if b_x_scale is not None:
        b_part = b_part * (b_x_scale[None, :] if SWAP else b_x_scale[:, None])
    if SWAP:
        b_part = b_part * b_scale[:, None]
    else:
        b_part = b_part * b_scale[None, :]
    if MINIMA:
        b_minimum = tl.load(p_minimum, mask=m_scale, other=0.0)
        b_sum = tl.sum(b_x.to(tl.float32), axis=1)
        if SWAP:
            b_part -= b_minimum[:, None] * b_sum[None, :]
        else:
            b_part -= b_sum[:, None] * b_minimum[None, :]
    return b_acc + b_part


@triton.jit
def _added(
    b_x, b_weight, b_acc, scales, b_scale, minima, o_row, m_n, first, b_x_scale,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Adds the product with a step's weights, from input `first` on, with the scales of its groups
    where there are some: `b_scale`, where they are a step's own."""
    MINIMA: tl.constexpr = minima is not None
    if not GROUPED:
        return _times(b_x, b_weight, b_acc, SWAP)
    elif b_weight.shape[1] > GROUP:
        o_group = first // GROUP + tl.arange(0, b_weight.shape[1] // GROUP)
        o_scale = o_row.to(tl.int64)[:, None] * GROUPS + o_group[None, :]
        m_scale = m_n[:, None] & (o_group < GROUPS)[None, :]
        p_minimum = minima + o_scale if MINIMA else scales
        b_weight = _scaled(b_weight, scales + o_scale, p_minimum, m_scale, b_x.dtype, GROUP, MINIMA)
        return _times(b_x, b_weight, b_acc, SWAP)
    else:
        o_scale = o_row * GROUPS + first // GROUP
        m_scale = m_n & (first < INPUTS)
        p_minimum = minima + o_scale if MINIMA else scales
        return _times_scaled(
            b_x, b_weight, b_acc, b_scale, p_minimum, m_scale, b_x_scale, SWAP, MINIMA
        )


@triton.jit
def _step_scales(
    scales, x_scales, o_row, o_m, m_n, m_m, first, UP: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Of a step from input `first` on: the scales of outputs, of those UP rows behind them, and of
    tokens (without any: of outputs again)."""
    here = first < INPUTS
    p_scale = scales + o_row * GROUPS + first // GROUP
    b_scale = tl.load(p_scale, mask=m_n & here, other=0.0)
    b_up = b_scale
    if UP > 0:
        b_up = tl.load(p_scale + UP * GROUPS, mask=m_n & here, other=0.0)
    b_x_scale = b_scale
    if x_scales is not None:
        p_x_scale = x_scales + o_m * GROUPS + first // GROUP
        b_x_scale = tl.load(p_x_scale, mask=m_m & here, other=0.0)
    return b_scale, b_up, b_x_scale


@triton.jit(do_not_specialize=["num_tokens"])
def skinny_kernel(
    x,
    x_scales,
    weight,
    scales,
    minima,
    bias,
    y,
    partial,
    counters,
    num_tokens,
    x_stride,
    y_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    SWAP: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """OUTPUTS are those of y: with ACTIVATION the weight has twice as many rows, gates first. With
    ADD y is the residual. GROUP inputs of a row share one of `scales` (float32 [rows, groups]), a
    multiple of K, a part of it that divides the inputs, or all of them; 0: there are none.
    `minima`: as the scales of groups; None: 0. `x_scales` float32 [T] where x is of e4m3 numbers,
    as the weight then is; of groups of a multiple of K [T, groups]. `partial`
    float32 [N tiles, SPLIT, 1 or 2, M, N]."""
    i_n = tl.program_id(0)
    i_split = tl.program_id(1)
    GATED: tl.constexpr = ACTIVATION != ""
    UP: tl.constexpr = OUTPUTS * INPUTS
    GROUPED: tl.constexpr = (GROUP > 0) & (GROUP < INPUTS)
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUPED else 1
    SHARE: tl.constexpr = (INPUTS + K * SPLIT - 1) // (K * SPLIT) * K
    o_m = tl.arange(0, M)
    o_n = i_n * N + tl.arange(0, N)
    o_k = tl.arange(0, K)
    m_m = o_m < num_tokens
    m_n = o_n < OUTPUTS
    o_row = tl.where(m_n, o_n, 0)
    begin = i_split * SHARE
    if DEPENDENT:
        if PREFETCH:
            prefetch_rows(weight + begin, o_row, INPUTS, PREFETCH * K)
            if GATED:
                prefetch_rows(weight + begin + UP, o_row, INPUTS, PREFETCH * K)
        gdc_launch_dependents()
        gdc_wait()
    p_x = x + o_m[:, None] * x_stride + begin + o_k[None, :]
    p_weight = weight + o_row.to(tl.int64)[:, None] * INPUTS + begin + o_k[None, :]
    b_acc = tl.zeros([N, M] if SWAP else [M, N], tl.float32)
    b_acc_up = tl.zeros([N, M] if SWAP else [M, N], tl.float32)
    EVEN: tl.constexpr = SHARE * SPLIT == INPUTS
    # Scales of a step are loaded during the one before: a product waits for nothing but its tiles.
    STEPWISE: tl.constexpr = GROUPED & (K <= GROUP)
    ROWS_UP: tl.constexpr = OUTPUTS if GATED else 0
    b_scale = None
    b_scale_up = None
    b_token = None
    if STEPWISE:
        b_scale, b_scale_up, b_token = _step_scales(
            scales, x_scales, o_row, o_m, m_n, m_m, begin, ROWS_UP, INPUTS, GROUP, GROUPS
        )
    for k in range(0, SHARE, K):
        if EVEN:
            b_x = tl.load(p_x + k, mask=m_m[:, None], other=0.0)
            b_weight = tl.load(p_weight + k, eviction_policy="evict_first")
            if GATED:
                b_weight_up = tl.load(p_weight + k + UP, eviction_policy="evict_first")
        else:
            m_k = (begin + k + o_k < INPUTS)[None, :]
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k, other=0.0)
            b_weight = tl.load(p_weight + k, mask=m_k, other=0.0, eviction_policy="evict_first")
            if GATED:
                b_weight_up = tl.load(
                    p_weight + k + UP, mask=m_k, other=0.0, eviction_policy="evict_first"
                )
        b_x_scale = None
        if STEPWISE:
            b_next, b_next_up, b_next_token = _step_scales(
                scales, x_scales, o_row, o_m, m_n, m_m, begin + k + K, ROWS_UP, INPUTS, GROUP,
                GROUPS,
            )  # fmt: skip
            if x_scales is not None:
                b_x_scale = b_token
        b_acc = _added(
            b_x, b_weight, b_acc, scales, b_scale, minima, o_row, m_n, begin + k, b_x_scale,
            INPUTS, GROUP, GROUPS, GROUPED, SWAP,
        )  # fmt: skip
        if GATED:
            b_acc_up = _added(
                b_x, b_weight_up, b_acc_up, scales, b_scale_up, minima, o_row + OUTPUTS, m_n,
                begin + k, b_x_scale, INPUTS, GROUP, GROUPS, GROUPED, SWAP,
            )  # fmt: skip
        if STEPWISE:
            b_scale, b_scale_up, b_token = b_next, b_next_up, b_next_token
    if SWAP:
        b_acc = tl.trans(b_acc)
        b_acc_up = tl.trans(b_acc_up)
    if SPLIT > 1:
        TILE: tl.constexpr = M * N
        PARTS: tl.constexpr = 2 if GATED else 1
        o_tile = o_m[:, None] * N + tl.arange(0, N)[None, :]
        p_tiles = partial + i_n.to(tl.int64) * (SPLIT * PARTS * TILE)
        p_mine = p_tiles + i_split * (PARTS * TILE) + o_tile
        tl.store(p_mine, b_acc, mask=m_m[:, None])
        if GATED:
            tl.store(p_mine + TILE, b_acc_up, mask=m_m[:, None])
        tl.debug_barrier()
        if tl.atomic_add(counters + i_n, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(counters + i_n, 0)
        b_acc = tl.zeros([M, N], tl.float32)
        b_acc_up = tl.zeros([M, N], tl.float32)
        for i in tl.static_range(SPLIT):
            p_one = p_tiles + i * (PARTS * TILE) + o_tile
            b_acc += tl.load(p_one, mask=m_m[:, None], other=0.0, cache_modifier=".cg")
            if GATED:
                b_acc_up += tl.load(
                    p_one + TILE, mask=m_m[:, None], other=0.0, cache_modifier=".cg"
                )
    if (x_scales is not None) and (not GROUPED):
        b_x_scale = tl.load(x_scales + o_m, mask=m_m, other=0.0)[:, None]
        b_acc *= b_x_scale
        if GATED:
            b_acc_up *= b_x_scale
    if (GROUP > 0) & (not GROUPED):
        b_acc *= tl.load(scales + o_n, mask=m_n, other=0.0)[None, :]
        if GATED:
            b_acc_up *= tl.load(scales + OUTPUTS + o_n, mask=m_n, other=0.0)[None, :]
    if BIAS:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            b_acc_up += tl.load(bias + OUTPUTS + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        b_acc = activate(b_acc, ACTIVATION) * b_acc_up
    m_y = m_m[:, None] & m_n[None, :]
    p_y = y + o_m[:, None].to(tl.int64) * y_stride + o_n[None, :]
    if ADD:
        b_acc += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_y)
