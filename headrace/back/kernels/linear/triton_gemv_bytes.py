"""A GEMM with one token and a weight of bytes (e4m3 numbers or integers) whose layout is chosen by
hand: what the compiler chooses for such tiles in triton_gemv.py goes through shared memory to
become floats. Read, scaled and surrounded as there.

I inputs, O outputs, N outputs of a program, K inputs of a step: CHUNK bytes a thread and row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.back.kernels.linear.gemv_bytes import UNIT
from headrace.back.kernels.triton.gluon import enter

CHUNK = gl.constexpr(UNIT)


@gluon.jit
def _tile(p_weight, o_k, m_n, k: gl.constexpr, INPUTS: gl.constexpr):
    m_w = m_n[:, None] & (k + o_k < INPUTS)[None, :]
    return gl.load(
        p_weight + (k + o_k)[None, :], mask=m_w, other=0.0, eviction_policy="evict_first"
    )


@gluon.jit
def _scaled(
    b_products, p_scale, o_chunk, m_n, k: gl.constexpr, INPUTS: gl.constexpr,
    GROUP: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Of a step's products [N, K] the sums of CHUNK inputs, times the scales of their groups:
    [N, K / CHUNK] in L."""
    N: gl.constexpr = b_products.shape[0]
    CHUNKS: gl.constexpr = b_products.shape[1] // CHUNK
    b_sums = gl.sum(gl.reshape(b_products, [N, CHUNKS, CHUNK]), axis=2)
    o_input = k + o_chunk * CHUNK
    m_scale = m_n[:, None] & (o_input < INPUTS)[None, :]
    b_scale = gl.load(p_scale[:, None] + (o_input // GROUP)[None, :], mask=m_scale, other=0.0)
    return gl.convert_layout(b_sums, L) * b_scale


@gluon.jit
def gemv_bytes_kernel(
    x, weight, scales, bias, norm_weight, y, eps,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr,
    WARPS: gl.constexpr, BIAS: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """As gemv_kernel, gated by SiLU. GROUP: a multiple of CHUNK, or at least INPUTS."""
    K: gl.constexpr = 32 * CHUNK * WARPS
    L: gl.constexpr = gl.BlockedLayout([N, CHUNK], [1, 32], [1, WARPS], [1, 0])
    SUMS: gl.constexpr = gl.BlockedLayout([N, 1], [1, 32], [1, WARPS], [1, 0])
    GROUPED: gl.constexpr = GROUP < INPUTS
    GROUPS: gl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUPED else 1
    UP: gl.constexpr = OUTPUTS * INPUTS
    o_n = gl.program_id(0) * N + gl.arange(0, N, layout=gl.SliceLayout(1, L))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    m_n = o_n < OUTPUTS
    p_weight = weight + o_n.to(gl.int64)[:, None] * INPUTS
    b_next = _tile(p_weight, o_k, m_n, 0, INPUTS)
    b_next_up = b_next
    if GATED:
        b_next_up = _tile(p_weight + UP, o_k, m_n, 0, INPUTS)
    enter(DEPENDENT)
    o_row = gl.program_id(0) * N + gl.arange(0, N, layout=gl.SliceLayout(1, SUMS))
    m_row = o_row < OUTPUTS
    o_chunk = gl.arange(0, K // CHUNK, layout=gl.SliceLayout(0, SUMS))
    p_scale = scales + o_row * GROUPS
    if GROUPED:
        b_acc = gl.zeros([N, K // CHUNK], gl.float32, SUMS)
        b_acc_up = gl.zeros([N, K // CHUNK], gl.float32, SUMS)
    else:
        b_acc = gl.zeros([N, K], gl.float32, L)
        b_acc_up = gl.zeros([N, K], gl.float32, L)
    b_squares = gl.zeros([K], gl.float32, gl.SliceLayout(0, L))
    for k in gl.static_range(0, INPUTS, K):
        b_w = b_next.to(gl.float32)
        b_w_up = b_next_up.to(gl.float32)
        if k + K < INPUTS:
            b_next = _tile(p_weight, o_k, m_n, k + K, INPUTS)
            if GATED:
                b_next_up = _tile(p_weight + UP, o_k, m_n, k + K, INPUTS)
        m_k = k + o_k < INPUTS
        b_x = gl.load(x + k + o_k, mask=m_k, other=0.0).to(gl.float32)
        if NORM:
            b_squares += b_x * b_x
            b_x = b_x * gl.load(norm_weight + k + o_k, mask=m_k, other=0.0)
        b_x = b_x[None, :]
        if GROUPED:
            b_acc += _scaled(b_w * b_x, p_scale, o_chunk, m_row, k, INPUTS, GROUP, SUMS)
            if GATED:
                b_acc_up += _scaled(
                    b_w_up * b_x, p_scale + OUTPUTS * GROUPS, o_chunk, m_row, k, INPUTS, GROUP, SUMS
                )
        else:
            b_acc += b_w * b_x
            if GATED:
                b_acc_up += b_w_up * b_x
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(b_squares, axis=0) / INPUTS + eps)
    b_y = gl.convert_layout(gl.sum(b_acc, axis=1), gl.SliceLayout(1, L)) * factor
    b_up = gl.convert_layout(gl.sum(b_acc_up, axis=1), gl.SliceLayout(1, L)) * factor
    if not GROUPED:
        b_y *= gl.load(scales + o_n, mask=m_n, other=0.0)
        if GATED:
            b_up *= gl.load(scales + OUTPUTS + o_n, mask=m_n, other=0.0)
    if BIAS:
        b_y += gl.load(bias + o_n, mask=m_n, other=0.0).to(gl.float32)
        if GATED:
            b_up += gl.load(bias + OUTPUTS + o_n, mask=m_n, other=0.0).to(gl.float32)
    if GATED:
        b_y = b_y / (1.0 + gl.exp(-b_y)) * b_up
    if ADD:
        b_y += gl.load(y + o_n, mask=m_n, other=0.0).to(gl.float32)
    gl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)
