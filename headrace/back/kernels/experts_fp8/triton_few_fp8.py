"""The experts of one token with weights of e4m3 numbers as they are: as experts/triton_few.py, with
numbers that become floats in registers. The second kernel asks for its weights before the first has
ended.

K slots of a token, E width, I inner size, N outputs of a program, C inputs of a step: whole groups
of 128, which share a scale where not all inputs do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.back.kernels.experts.triton_experts import gated
from headrace.back.kernels.triton.grid import enter_late, prefetch


@triton.jit
def _sums(
    p_x, p_weight, p_scale, m_n, INPUTS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Of N rows of weights at p_weight [N, 1, 1] with x: [N, C / 128, 128], to be added up."""
    GROUPS: tl.constexpr = C // 128
    o_g = tl.arange(0, GROUPS)[None, :, None]
    o_c = o_g * 128 + tl.arange(0, 128)[None, None, :]
    b_sum = tl.zeros([N, GROUPS, 128], tl.float32)
    for begin in tl.static_range(0, INPUTS, C):
        m_c = begin + o_c < INPUTS
        b_x = tl.load(p_x + begin + o_c, mask=m_c, other=0.0).to(tl.float32)
        p_w = p_weight + begin + o_c
        b_w = tl.load(p_w, mask=m_n & m_c, other=0.0, eviction_policy="evict_first")
        b_w = b_w.to(tl.float32)
        if GROUPED:
            m_g = m_n & (begin + o_g * 128 < INPUTS)
            b_w *= tl.load(p_scale + (begin // 128 + o_g) * ROWS, mask=m_g, other=0.0)
        b_sum += b_x * b_w
    if not GROUPED:
        b_sum *= tl.load(p_scale, mask=m_n, other=0.0)
    return b_sum


@triton.jit
def _total(b_sum):
    return tl.sum(tl.sum(b_sum, axis=2), axis=1)


@triton.jit
def few_up_fp8_kernel(
    x, up, scales, bias, expert, inner, clamp, alpha, SLOTS: tl.constexpr, E: tl.constexpr,
    I: tl.constexpr, N: tl.constexpr, C: tl.constexpr, GROUPED: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, OAI: tl.constexpr, BIAS: tl.constexpr,
    ABSENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of inner values, pairs. inner [P, I]."""
    enter_late(DEPENDENT)
    G: tl.constexpr = (E + 127) // 128 if GROUPED else 1
    i_p = tl.program_id(1).to(tl.int64)
    i_x = tl.load(expert + i_p).to(tl.int64)
    if ABSENT:  # noqa: SIM102  (known when it is compiled)
        if i_x < 0:
            return
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    o_3 = o_n[:, None, None]
    m_n = o_3 < I
    p_x = x + i_p // SLOTS * E
    p_w = up + (i_x * (2 * I) + o_3) * E
    p_s = scales + i_x * (G * 2 * I) + o_3
    b_g = _total(_sums(p_x, p_w, p_s, m_n, E, 2 * I, N, C, GROUPED))
    b_u = _total(_sums(p_x, p_w + I * E, p_s + I, m_n, E, 2 * I, N, C, GROUPED))
    if BIAS:
        p_bias = bias + i_x * (2 * I) + o_n
        b_g += tl.load(p_bias, mask=o_n < I, other=0.0).to(tl.float32)
        b_u += tl.load(p_bias + I, mask=o_n < I, other=0.0).to(tl.float32)
    b_h = gated(b_g, b_u, clamp, alpha, ACTIVATION, CLAMP, OAI)
    tl.store(inner + i_p * I + o_n, b_h.to(inner.dtype.element_ty), mask=o_n < I)


@triton.jit
def few_down_fp8_kernel(
    inner, down, scales, bias, expert, weight, y, y_stride, SLOTS: tl.constexpr, E: tl.constexpr,
    I: tl.constexpr, N: tl.constexpr, C: tl.constexpr, LINES: tl.constexpr, GROUPED: tl.constexpr,
    BIAS: tl.constexpr, ABSENT: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of outputs, tokens. LINES: at least those of 128 inputs. With ADD y is the
    residual."""
    G: tl.constexpr = (I + 127) // 128 if GROUPED else 1
    i_t = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    if DEPENDENT:  # which experts those are was written before the first kernel began
        o_line = tl.minimum(tl.arange(0, LINES) * 128, I - 1)
        for k in tl.static_range(SLOTS):
            i_x = tl.load(expert + i_t * SLOTS + k).to(tl.int64)
            if ABSENT:
                i_x = tl.maximum(i_x, 0)
            o_row = i_x * E + tl.minimum(o_n, E - 1)
            prefetch(down + o_row[:, None] * I + o_line[None, :])
    enter_late(DEPENDENT)
    o_3 = o_n[:, None, None]
    m_n = o_3 < E
    b_y = tl.zeros([N], tl.float32)
    b_all = tl.zeros([N, C // 128, 128], tl.float32)
    for k in tl.static_range(SLOTS):
        i_p = i_t * SLOTS + k
        i_x = tl.load(expert + i_p).to(tl.int64)
        p_w = down + (i_x * E + o_3) * I
        p_s = scales + i_x * (G * E) + o_3
        factor = tl.load(weight + i_p)
        if ABSENT:
            if i_x >= 0:
                b_all += _sums(inner + i_p * I, p_w, p_s, m_n, I, E, N, C, GROUPED) * factor
        else:
            b_all += _sums(inner + i_p * I, p_w, p_s, m_n, I, E, N, C, GROUPED) * factor
        if BIAS:
            m_b = (o_n < E) & (i_x >= 0) if ABSENT else o_n < E
            b_bias = tl.load(bias + i_x * E + o_n, mask=m_b, other=0.0).to(tl.float32)
            b_y += b_bias * factor
    b_y += _total(b_all)
    p_y = y + i_t * y_stride + o_n
    if ADD:
        b_y += tl.load(p_y, mask=o_n < E, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=o_n < E)
