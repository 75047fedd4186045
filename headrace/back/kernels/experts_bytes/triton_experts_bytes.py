"""Grouped GEMMs with weights of a byte a number by tl.dot on any GPU: over the sorted rows of
experts/triton_dispatch.py, a tile of M rows and N results of one expert at a time. Numbers become
the dtype of x in registers: int8 with a scale for all inputs exactly, others times their scale.

How many rows a tile has depends on the step's sizes alone, never on where tokens go, so a step can
be recorded.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.experts.op import OAI_ALPHA, Experts, ExpertsProblem
from headrace.back.kernels.experts.triton_dispatch import combined, dispatched
from headrace.back.kernels.experts.triton_experts import (
    KNOWN,
    MAX_EXPERTS,
    activation_constants,
    check_arguments,
    gated,
    tile_at,
)
from headrace.back.kernels.experts_bytes.layout import GROUPS, ByteExperts
from headrace.back.kernels.experts_bytes.op import ExpertsBytesProblem, sample_of
from headrace.back.kernels.experts_fp8.layout import ScaledMatrices
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import (
    capability,
    interpreted,
    launch,
    num_sms,
    unsupported,
)

UNIT = 16
"""Inputs of a matrix are a multiple of it."""
ROWS = {10: 16, 40: 32}
"""Rows of a tile by the pairs that an expert has on average, at most; as of experts_fp8."""
MOST_ROWS = 64
N, K = 64, 128
PROGRAMS_PER_SM = 3


@triton.jit
def _weights(
    p_w, p_s, o_k, m_n, m_k, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The weights of a block [N, K] at p_w; p_s: the scales of its rows and first group."""
    b_w = tl.load(p_w, mask=m_n[:, None] & m_k[None, :], other=0.0)
    if GROUP != 0:
        P: tl.constexpr = K // GROUP
        o_p = tl.arange(0, P)
        m_p = tl.max(tl.reshape(m_k.to(tl.int32), [P, GROUP]), axis=1) > 0
        m_s = m_n[:, None] & m_p[None, :]
        b_s = tl.load(p_s[:, None] + o_p[None, :] * ROWS, mask=m_s, other=0.0)
        b_all = tl.reshape(b_w.to(tl.float32), [N, P, GROUP]) * b_s[:, :, None]
        return tl.reshape(b_all, [N, K]).to(DTYPE)
    else:
        return b_w.to(DTYPE)


@triton.jit
def grouped_bytes_kernel(
    x,
    weight,
    scales,
    bias,
    tiles,
    y,
    clamp,
    alpha,
    INPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
    GROUP: tl.constexpr,
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
    """Grid: any. y [., RESULTS] of the sorted rows x [., INPUTS]; if GATED an expert has twice as
    many rows of weights, gates first. GROUP inputs share a scale, 0: all."""
    enter(DEPENDENT)
    COLUMNS: tl.constexpr = (RESULTS + N - 1) // N
    G: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUP else 1
    ROWS: tl.constexpr = 2 * RESULTS if GATED else RESULTS
    STEP: tl.constexpr = K // GROUP * ROWS if GROUP else 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    o_k = tl.arange(0, K)
    for i_work in range(tl.program_id(0), tl.load(tiles) * COLUMNS, tl.num_programs(0)):
        i_x, m_m, o_row, o_n, m_n = tile_at(tiles, i_work, COLUMNS, RESULTS, M, N)
        p_x = x + o_row[:, None] * INPUTS + o_k[None, :]
        p_w = weight + (i_x * ROWS + o_n)[:, None] * INPUTS + o_k[None, :]
        p_s = scales + i_x * (G * ROWS) + o_n
        b_acc = tl.zeros([N, M], tl.float32)
        b_up = tl.zeros([N, M], tl.float32)
        for i in range(0, (INPUTS + K - 1) // K):
            m_k = i * K + o_k < INPUTS
            b_x = tl.trans(tl.load(p_x + i * K, mask=m_m[:, None] & m_k[None, :], other=0.0))
            b_w = _weights(p_w + i * K, p_s + i * STEP, o_k, m_n, m_k, ROWS, N, K, GROUP, DTYPE)
            b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
            if GATED:
                p_more = p_w + RESULTS * INPUTS + i * K
                p_scale = p_s + RESULTS + i * STEP
                b_w = _weights(p_more, p_scale, o_k, m_n, m_k, ROWS, N, K, GROUP, DTYPE)
                b_up = tl.dot(b_w, b_x, b_up, input_precision="ieee")
        if GROUP == 0:
            b_acc *= tl.load(p_s, mask=m_n, other=0.0)[:, None]
            if GATED:
                b_up *= tl.load(p_s + RESULTS, mask=m_n, other=0.0)[:, None]
        if BIAS:
            p_bias = bias + i_x * ROWS + o_n
            b_acc += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                b_up += tl.load(p_bias + RESULTS, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            b_acc = gated(b_acc, b_up, clamp, alpha, ACTIVATION, CLAMP, OAI)
        p_y = y + o_row[None, :] * RESULTS + o_n[:, None]
        tl.store(p_y, b_acc.to(DTYPE), mask=m_n[:, None] & m_m[None, :])


def rows_for(problem: ExpertsProblem, num_tokens: int) -> int:
    """Rows of a tile in a step of so many tokens."""
    mean = num_tokens * problem.slots / problem.experts
    return next((m for most, m in ROWS.items() if mean <= most), MOST_ROWS)


def bind(
    problem: ExpertsBytesProblem,
    experts: ByteExperts,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
    *,
    always: int | None = None,
) -> Experts:
    """The kernels for one layer. `always`: by tiles of so many rows, whatever the step."""
    mixture = problem.mixture

    def run(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_arguments(mixture, x_TE, expert_TK, weight_TK)
        m = always or rows_for(mixture, len(x_TE))
        dispatch = dispatched(x_TE, expert_TK, experts=mixture.experts, m=m, absent=mixture.absent)
        rows_NE, tiles = dispatch.rows_NE, dispatch.tiles
        inner_NI = x_TE.new_empty((len(rows_NE), mixture.inner))
        _multiply(mixture, rows_NE, experts.up, up_bias_XI, tiles, inner_NI, m=m, is_gated=True)
        _multiply(mixture, inner_NI, experts.down, down_bias_XE, tiles, rows_NE, m=m)
        return combined(
            rows_NE, weight_TK, dispatch.places_P, x_TE, residual_TE, absent=mixture.absent
        )

    return run


def _multiply(
    problem: ExpertsProblem,
    x_NI: torch.Tensor,
    weight: ScaledMatrices,
    bias_XO: torch.Tensor | None,
    tiles: torch.Tensor,
    y_NO: torch.Tensor,
    *,
    m: int,
    is_gated: bool = False,
) -> None:
    matrices = 2 if is_gated else 1
    stage = m * K * x_NI.element_size() + matrices * N * K
    grouped_bytes_kernel[(num_sms(x_NI.device) * PROGRAMS_PER_SM,)](
        x_NI, weight.values_XOI, weight.scales_XGO, bias_XO, tiles, y_NO, problem.clamp, OAI_ALPHA,
        INPUTS=x_NI.shape[1], RESULTS=y_NO.shape[1], GROUP=weight.group or 0, M=m, N=N, K=K,
        GATED=is_gated, **activation_constants(problem), BIAS=bias_XO is not None, num_warps=4,
        num_stages=fitting_stages(3, stage), **launch(x_NI.device),
    )  # fmt: skip


def plans(problem: ExpertsBytesProblem) -> list[PlanCheck]:
    """Each size of tile on the mixture's own sizes."""
    return [
        PlanCheck(
            name=f"tiles of {m}",
            sample=partial(sample_of, problem, (m + 1,)),
            bind=partial(bind, always=m),
        )
        for m in (*ROWS.values(), MOST_ROWS)
    ]


def _supports(problem: ExpertsBytesProblem) -> str | None:
    mixture, form = problem.mixture, problem.form
    if mixture.beside:
        return "adds nothing beside"
    if mixture.experts > MAX_EXPERTS:
        return f"knows {MAX_EXPERTS} experts at most"
    for inputs in (mixture.width, mixture.inner):
        if inputs % UNIT:
            return f"{inputs} inputs are no multiple of {UNIT}"
    if form.group not in (None, *GROUPS):
        return f"scales of {', '.join(map(str, GROUPS))} inputs or of all, not of {form.group}"
    if mixture.activation not in KNOWN:
        return f"does not know {mixture.activation}"
    reason = unsupported(problem.device, problem.dtype)
    if reason is None and form.floats and torch.version.hip is not None:
        return "multiplies e4m3 numbers on NVIDIA's GPUs"
    if reason is None and form.floats and not interpreted() and capability() < (8, 9):
        return "e4m3 needs compute capability 8.9, not {}.{}".format(*capability())
    return reason


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=plans)
