"""A GEMM with one token, bound by reading the weight once: a program takes some outputs over all
inputs.

Rows of the weight are read 16 bytes a thread and dropped from the cache first. The first part is
asked for before the kernel waits for the one before it, so that a chain of GEMMs keeps the memory
busy. Around the GEMM, as in kernels/fused_linear: a norm of x (its scale is one number, so it is
applied to the sums), a gated activation, an addition into the residual.

I inputs, O outputs, N outputs of a program, K inputs of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.linear.triton_skinny import floats, prefetch_rows


@triton.jit
def _part(p_weight, m_n, o_k, k: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr):
    """Columns k .. k + K of the program's rows of the weight."""
    m_part = m_n[:, None]
    if k + K > INPUTS:
        m_part = m_part & (k + o_k < INPUTS)[None, :]
    return tl.load(
        p_weight + k + o_k[None, :], mask=m_part, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _sums(
    b_products, b_x, p_scale, p_minimum, m_n, k: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """What is added of a step's products [N, K]: themselves, or the sums of groups, scaled, less
    those of x times their minima."""
    if GROUP == 0 or GROUP >= INPUTS:
        return b_products
    else:
        N: tl.constexpr = b_products.shape[0]
        COUNT: tl.constexpr = b_products.shape[1] // GROUP
        o_group = k // GROUP + tl.arange(0, COUNT)
        m_scale = m_n[:, None] & (o_group * GROUP < INPUTS)[None, :]
        b_scale = tl.load(p_scale[:, None] + o_group[None, :], mask=m_scale, other=0.0)
        b_sums = tl.sum(tl.reshape(b_products, [N, COUNT, GROUP]), axis=2) * b_scale
        if MINIMA:
            p_minima = p_minimum[:, None] + o_group[None, :]
            b_minimum = tl.load(p_minima, mask=m_scale, other=0.0)
            b_sums -= tl.sum(tl.reshape(b_x, [1, COUNT, GROUP]), axis=2) * b_minimum
        return b_sums


@triton.jit
def gemv_kernel(
    x,
    weight,
    scales,
    minima,
    bias,
    norm_weight,
    y,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PREFETCH: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """OUTPUTS are those of y: with ACTIVATION the weight has twice as many rows, gates first. With
    ADD y is the residual. GROUP inputs of a row share one of `scales` (float32 [rows, groups]), a
    divisor of K or all of them; 0: there are none. `minima`: of groups, as the scales; None: 0."""
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    o_k = tl.arange(0, K)
    m_n = o_n < OUTPUTS
    p_weight = weight + o_n.to(tl.int64)[:, None] * INPUTS
    GATED: tl.constexpr = ACTIVATION != ""
    UP: tl.constexpr = OUTPUTS * INPUTS
    b_next = _part(p_weight, m_n, o_k, 0, INPUTS, K)
    if GATED:
        b_next_up = _part(p_weight + UP, m_n, o_k, 0, INPUTS, K)
    if DEPENDENT:
        if PREFETCH:
            o_row = tl.where(m_n, o_n, 0)
            prefetch_rows(weight + K, o_row, INPUTS, PREFETCH * K)
            if GATED:
                prefetch_rows(weight + UP + K, o_row, INPUTS, PREFETCH * K)
        gdc_launch_dependents()
        gdc_wait()
    GROUPED: tl.constexpr = (GROUP > 0) & (GROUP < INPUTS)
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUPED else 1
    SUMS: tl.constexpr = K // GROUP if GROUPED else K
    p_scale = scales + o_n * GROUPS if GROUPED else scales
    p_scale_up = p_scale + OUTPUTS * GROUPS if GROUPED else scales
    MINIMA: tl.constexpr = minima is not None
    p_minimum = minima + o_n * GROUPS if MINIMA else p_scale
    p_minimum_up = p_minimum + OUTPUTS * GROUPS if MINIMA else p_scale
    b_acc = tl.zeros([N, SUMS], tl.float32)
    b_acc_up = tl.zeros([N, SUMS], tl.float32)
    b_squares = tl.zeros([1, K], tl.float32)
    for k in tl.static_range(0, INPUTS, K):
        b_weight = floats(b_next)
        if GATED:
            b_weight_up = floats(b_next_up)
        m_k = (k + o_k < INPUTS)[None, :]
        b_x = tl.load(x + k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
        if k + K < INPUTS:
            b_next = _part(p_weight, m_n, o_k, k + K, INPUTS, K)
            if GATED:
                b_next_up = _part(p_weight + UP, m_n, o_k, k + K, INPUTS, K)
        if NORM:
            b_squares += b_x * b_x
            b_x = b_x * tl.load(norm_weight + k + o_k[None, :], mask=m_k, other=0.0)
        b_acc += _sums(b_x * b_weight, b_x, p_scale, p_minimum, m_n, k, INPUTS, GROUP, MINIMA)
        if GATED:
            b_acc_up += _sums(
                b_x * b_weight_up, b_x, p_scale_up, p_minimum_up, m_n, k, INPUTS, GROUP, MINIMA
            )
    b_y = tl.sum(b_acc, axis=1)
    if (GROUP > 0) & (not GROUPED):
        b_y *= tl.load(scales + o_n, mask=m_n, other=0.0)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(b_squares, axis=1), axis=0) / INPUTS + eps)
        b_y = b_y * scale
    if BIAS:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    if GATED:
        b_up = tl.sum(b_acc_up, axis=1)
        if (GROUP > 0) & (not GROUPED):
            b_up *= tl.load(scales + OUTPUTS + o_n, mask=m_n, other=0.0)
        if NORM:
            b_up = b_up * scale
        if BIAS:
            b_up += tl.load(bias + OUTPUTS + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_y = activate(b_y, ACTIVATION) * b_up
    if ADD:
        b_y += tl.load(y + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)
