"""The experts of one token, or of very few, bound by reading the chosen experts once: no
sorting, no tensor cores, two launches.

A program of the first takes some inner values of one pair of a token and a slot, gates and ups at
once; one of the second some outputs of a token, over all of its slots, so that nothing is left to
add up. Experts that two tokens share are read twice, the second time most likely from the
second-level cache.

The second reads its first weights before the first has ended: which experts those are was written
before the first began (`enter_late`).

K slots of a token, E width, I inner size, N outputs of a program, C inputs of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.experts.triton_experts import gated
from headrace.back.kernels.triton.grid import enter_late


@triton.jit
def _part(p_weight, m_n, o_c, begin: tl.constexpr, INPUTS: tl.constexpr, C: tl.constexpr):
    """Columns begin .. begin + C of some rows of a weight."""
    m_part = m_n[:, None]
    if begin + C > INPUTS:
        m_part = m_part & (begin + o_c < INPUTS)[None, :]
    return tl.load(
        p_weight + begin + o_c[None, :], mask=m_part, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)


@triton.jit
def few_up_kernel(
    x, up, bias, expert, inner, clamp, alpha, SLOTS: tl.constexpr, E: tl.constexpr, I: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr,
    OAI: tl.constexpr, BIAS: tl.constexpr, ABSENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of inner values, pairs. inner [P, I]."""
    enter_late(DEPENDENT)
    i_p = tl.program_id(1).to(tl.int64)
    i_x = tl.load(expert + i_p).to(tl.int64)
    if ABSENT:  # noqa: SIM102  (known when it is compiled)
        if i_x < 0:
            return
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    o_c = tl.arange(0, C)
    m_n = o_n < I
    p_x = x + i_p // SLOTS * E + o_c
    p_gate = up + (i_x * (2 * I) + o_n)[:, None] * E
    b_gate = tl.zeros([N, C], tl.float32)
    b_up = tl.zeros([N, C], tl.float32)
    for begin in tl.static_range(0, E, C):
        b_x = tl.load(p_x + begin, mask=begin + o_c < E, other=0.0).to(tl.float32)[None, :]
        b_gate += b_x * _part(p_gate, m_n, o_c, begin, E, C)
        b_up += b_x * _part(p_gate + I * E, m_n, o_c, begin, E, C)
    b_g, b_u = tl.sum(b_gate, axis=1), tl.sum(b_up, axis=1)
    if BIAS:
        p_bias = bias + i_x * (2 * I) + o_n
        b_g += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)
        b_u += tl.load(p_bias + I, mask=m_n, other=0.0).to(tl.float32)
    b_h = gated(b_g, b_u, clamp, alpha, ACTIVATION, CLAMP, OAI)
    tl.store(inner + i_p * I + o_n, b_h.to(inner.dtype.element_ty), mask=m_n)


@triton.jit
def few_down_kernel(
    inner, down, bias, expert, weight, y, y_stride, SLOTS: tl.constexpr, E: tl.constexpr,
    I: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, ABSENT: tl.constexpr,
    ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of outputs, tokens. With ADD y is the residual."""
    i_t = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    o_c = tl.arange(0, C)
    m_n = o_n < E
    i_x = tl.load(expert + i_t * SLOTS).to(tl.int64)
    m_x = m_n & (i_x >= 0) if ABSENT else m_n
    b_next = _part(down + (i_x * E + o_n)[:, None] * I, m_x, o_c, 0, I, C)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b_y = tl.zeros([N], tl.float32)
    b_acc = tl.zeros([N, C], tl.float32)
    for k in tl.static_range(SLOTS):
        i_p = i_t * SLOTS + k
        i_x = tl.load(expert + i_p).to(tl.int64)
        p_down = down + (i_x * E + o_n)[:, None] * I
        factor = tl.load(weight + i_p)
        m_x = m_n & (i_x >= 0) if ABSENT else m_n
        for begin in tl.static_range(0, I, C):
            m_c = begin + o_c < I
            if ABSENT:
                m_c = m_c & (i_x >= 0)
            b_h = tl.load(inner + i_p * I + begin + o_c, mask=m_c, other=0.0).to(tl.float32)
            if k + begin > 0:
                b_next = _part(p_down, m_x, o_c, begin, I, C)
            b_acc += (b_h * factor)[None, :] * b_next
        if BIAS:
            b_bias = tl.load(bias + i_x * E + o_n, mask=m_x, other=0.0).to(tl.float32)
            b_y += b_bias * factor
    b_y += tl.sum(b_acc, axis=1)
    p_y = y + i_t * y_stride + o_n
    if ADD:
        b_y += tl.load(p_y, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_n)
