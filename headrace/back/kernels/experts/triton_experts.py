"""The experts of a mixture in Triton, all on the device: pairs of a token and a slot are sorted by
expert, two grouped GEMMs run over them, and each token's results are added up. A result is one sum
in one order, whatever else is in the step.

How many pairs an expert has is known on the device only, so the grouped GEMMs are persistent: each
program goes through the tiles of the dispatch's list that are its own. A tile holds M rows of one
expert. X experts, K slots of a token, E width, I inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.experts.op import (
    OAI_ALPHA,
    SITU,
    SITU_BOUNDS,
    SWIGLU_OAI,
    SWIGLU_STEP,
    Beside,
    Experts,
    ExpertsProblem,
    check_beside,
)
from headrace.back.kernels.experts.triton_dispatch import combined, dispatched
from headrace.back.kernels.gated_act.triton_gated_act import ACTIVATIONS, activate
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    has_known_products,
    launch,
    num_sms,
    unsupported,
)

FEW, MANY = 16, 64
"""Pairs of a tile: where experts have few on average, and else."""
OUTPUTS, INPUTS = 64, 64
"""Rows of a weight in a tile, and of a step of its sums."""
PROGRAMS_PER_SM = 3
MAX_EXPERTS = 1024
KNOWN = (*ACTIVATIONS, SWIGLU_OAI, SWIGLU_STEP, SITU)
"""The activations of `gated`."""
_GATE_BOUND, _UP_BOUND = (tl.constexpr(bound) for bound in SITU_BOUNDS)


@triton.jit
def tile_at(
    tiles, i_work, COLUMNS: tl.constexpr, RESULTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Of item `i_work` of the dispatch's list, where each tile of M rows has COLUMNS items of N
    results: its expert, which rows are there, the rows, the results, and which of them are."""
    i_tile = i_work // COLUMNS
    i_x = tl.load(tiles + 1 + 2 * i_tile).to(tl.int64)
    o_m = tl.arange(0, M)
    m_m = o_m < tl.load(tiles + 2 + 2 * i_tile)
    o_row = i_tile.to(tl.int64) * M + o_m
    o_n = i_work % COLUMNS * N + tl.arange(0, N)
    return i_x, m_m, o_row, o_n, o_n < RESULTS


@triton.jit
def _bounded(b_x, BOUND: tl.constexpr):
    """BOUND tanh(x / BOUND): near 0 by its series, where a difference of sigmoids loses digits."""
    b_part = b_x / BOUND
    b_square = b_part * b_part
    b_series = 1.0 - b_square * (1 / 3 - b_square * (2 / 15 - b_square * (17 / 315)))
    b_far = BOUND * (2.0 * tl.sigmoid(2.0 * b_part) - 1.0)
    return tl.where(b_square < 0.04, b_x * b_series, b_far)


@triton.jit
def gated(
    b_gate, b_up, clamp, alpha, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, OAI: tl.constexpr
):
    if ACTIVATION == "swiglu_step":
        b_up = tl.minimum(tl.maximum(b_up, -clamp), clamp)
        return tl.minimum(activate(b_gate, "silu"), clamp) * b_up
    if CLAMP:
        b_gate = tl.minimum(b_gate, clamp)
        b_up = tl.minimum(tl.maximum(b_up, -clamp), clamp)
    if OAI:
        return b_gate * tl.sigmoid(alpha * b_gate) * (b_up + 1.0)
    if ACTIVATION == "situ":
        return tl.sigmoid(b_gate) * _bounded(b_gate, _GATE_BOUND) * _bounded(b_up, _UP_BOUND)
    return activate(b_gate, ACTIVATION) * b_up


@triton.jit
def up_kernel(
    rows, up, bias, more, tiles, inner, clamp, alpha, E: tl.constexpr, I: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr, OAI: tl.constexpr, BIAS: tl.constexpr, MORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: any. inner [., I] of the sorted rows; more [., 2I] is added to their gates and ups."""
    enter(DEPENDENT)
    COLUMNS: tl.constexpr = (I + N - 1) // N
    o_k = tl.arange(0, K)
    for i_work in range(tl.program_id(0), tl.load(tiles) * COLUMNS, tl.num_programs(0)):
        i_x, m_m, o_row, o_n, m_n = tile_at(tiles, i_work, COLUMNS, I, M, N)
        p_x = rows + o_row[:, None] * E + o_k[None, :]
        p_gate = up + (i_x * (2 * I) + o_n[None, :]) * E + o_k[:, None]
        b_gate = tl.zeros([M, N], tl.float32)
        b_up = tl.zeros([M, N], tl.float32)
        for begin in range(0, E, K):
            m_k = begin + o_k < E
            m_w = m_n[None, :] & m_k[:, None]
            b_x = tl.load(p_x + begin, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_gate + begin, mask=m_w, other=0.0)
            b_gate = tl.dot(b_x, b_w, b_gate, input_precision="ieee")
            b_w = tl.load(p_gate + I * E + begin, mask=m_w, other=0.0)
            b_up = tl.dot(b_x, b_w, b_up, input_precision="ieee")
        if BIAS:
            p_bias = bias + i_x * (2 * I) + o_n
            b_gate += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[None, :]
            b_up += tl.load(p_bias + I, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if MORE:
            p_more = more + o_row[:, None] * (2 * I) + o_n[None, :]
            m_more = m_m[:, None] & m_n[None, :]
            b_gate += tl.load(p_more, mask=m_more, other=0.0)
            b_up += tl.load(p_more + I, mask=m_more, other=0.0)
        b_h = gated(b_gate, b_up, clamp, alpha, ACTIVATION, CLAMP, OAI)
        p_h = inner + o_row[:, None] * I + o_n[None, :]
        tl.store(p_h, b_h.to(inner.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def down_kernel(
    inner, down, bias, tiles, out, E: tl.constexpr, I: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: any. out [., E] of the sorted rows, not weighted."""
    enter(DEPENDENT)
    COLUMNS: tl.constexpr = (E + N - 1) // N
    o_k = tl.arange(0, K)
    for i_work in range(tl.program_id(0), tl.load(tiles) * COLUMNS, tl.num_programs(0)):
        i_x, m_m, o_row, o_n, m_n = tile_at(tiles, i_work, COLUMNS, E, M, N)
        p_h = inner + o_row[:, None] * I + o_k[None, :]
        p_w = down + (i_x * E + o_n[None, :]) * I + o_k[:, None]
        b_acc = tl.zeros([M, N], tl.float32)
        for begin in range(0, I, K):
            m_k = begin + o_k < I
            b_h = tl.load(p_h + begin, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + begin, mask=m_n[None, :] & m_k[:, None], other=0.0)
            b_acc = tl.dot(b_h, b_w, b_acc, input_precision="ieee")
        if BIAS:
            p_bias = bias + i_x * E + o_n
            b_acc += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[None, :]
        p_y = out + o_row[:, None] * E + o_n[None, :]
        tl.store(p_y, b_acc.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def bind(
    problem: ExpertsProblem,
    up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The kernels for one layer; keeps the weights."""
    up_XIE, down_XEI = up_XIE.contiguous(), down_XEI.contiguous()
    count, width, inner = problem.experts, problem.width, problem.inner
    tile = {"E": width, "I": inner, "N": OUTPUTS, "K": INPUTS, "num_warps": 4, "num_stages": 3}
    if problem.dtype is torch.float32:
        tile["num_stages"] = 1
    few = FEW if has_known_products() and problem.dtype is not torch.float32 else MANY

    def experts(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        beside: Beside | None = None,
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_arguments(problem, x_TE, expert_TK, weight_TK)
        pairs, device = expert_TK.numel(), x_TE.device
        m = few if pairs <= FEW * count else MANY
        common, programs = launch(device), (num_sms(device) * PROGRAMS_PER_SM,)
        sorted_rows = dispatched(x_TE, expert_TK, experts=count, m=m, absent=problem.absent)
        rows_NE = sorted_rows.rows_NE
        constants = {"M": m, "BIAS": problem.bias, **tile}
        inner_NI = x_TE.new_empty((len(rows_NE), inner))
        more_NI = None
        if beside is not None:
            places_P = sorted_rows.places_P.long()
            check_beside(problem, beside, len(x_TE))
            more_NI = beside[0].new_zeros((len(rows_NE), 2 * inner))
            more_NI.index_copy_(0, places_P, beside[0].view(pairs, -1))
        up_kernel[programs](
            rows_NE, up_XIE, up_bias_XI, more_NI, sorted_rows.tiles, inner_NI, problem.clamp,
            OAI_ALPHA, MORE=beside is not None, **activation_constants(problem), **constants,
            **common,
        )  # fmt: skip
        if beside is not None:
            taken_PI = inner_NI.index_select(0, places_P)
            beside[1].view(pairs, -1).copy_(taken_PI)
        # The rows themselves are read no more: they take the results.
        down_kernel[programs](
            inner_NI, down_XEI, down_bias_XE, sorted_rows.tiles, rows_NE, **constants, **common
        )
        return combined(
            rows_NE, weight_TK, sorted_rows.places_P, x_TE, residual_TE, absent=problem.absent
        )

    if problem.adds:
        return lambda *arguments: experts(*arguments[:3], residual_TE=arguments[3])
    return experts


def activation_constants(problem: ExpertsProblem) -> dict[str, str | bool]:
    """What `gated` is told."""
    is_oai = problem.activation == SWIGLU_OAI
    name = "silu" if is_oai else problem.activation
    return {"ACTIVATION": name, "CLAMP": problem.clamp > 0, "OAI": is_oai}


def check_arguments(
    problem: ExpertsProblem, x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
) -> None:
    """Asserts what kernels of this op rely on."""
    assert x_TE.dtype == problem.dtype and x_TE.is_contiguous(), (x_TE.dtype, x_TE.stride())
    assert expert_TK.is_contiguous() and weight_TK.is_contiguous(), expert_TK.stride()
    assert expert_TK.shape == weight_TK.shape == (len(x_TE), problem.slots), expert_TK.shape


def _supports(problem: ExpertsProblem) -> str | None:
    if problem.experts > MAX_EXPERTS:
        return f"knows {MAX_EXPERTS} experts at most"
    if problem.activation not in KNOWN:
        return f"does not know {problem.activation}"
    if problem.beside and problem.absent:
        return "adds nothing beside experts of which a rank has some"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
