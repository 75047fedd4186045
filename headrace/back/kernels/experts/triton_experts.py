"""The experts of a mixture in Triton, all on the device: pairs of a token and a slot are sorted by
expert, two grouped GEMMs run over them, and each token's results are added up.

How many pairs an expert has is known on the device only, so the grouped GEMMs are persistent: each
program counts the tiles of all experts and goes through those that are its own. A tile holds M
pairs of one expert. P pairs, X experts, K slots of a token, E width, I inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.experts.op import OAI_ALPHA, SWIGLU_OAI, Experts, ExpertsProblem
from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import (
    has_known_products,
    launch,
    num_sms,
    power_of_two,
    unsupported,
)

FEW, MANY = 16, 64
"""Pairs of a tile: where experts have few on average, and else."""
OUTPUTS, INPUTS = 64, 64
"""Rows of a weight in a tile, and of a step of its sums."""
PROGRAMS_PER_SM = 3
SORTED, ADDED = 1024, 1024
"""Pairs that a program sorts at a time; outputs of a token that one adds up."""
MAX_EXPERTS = 1024


@triton.jit
def sort_kernel(
    expert, pairs, places, starts, num_pairs, X: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: experts. pairs: their numbers by expert, in order; places: where each pair is among
    them; starts [X + 1]: the first of each expert."""
    enter(DEPENDENT)
    i_x = tl.program_id(0)
    o_p = tl.arange(0, BLOCK)
    below = 0
    for begin in range(0, num_pairs, BLOCK):
        b_expert = tl.load(expert + begin + o_p, mask=begin + o_p < num_pairs, other=X)
        below += tl.sum((b_expert < i_x).to(tl.int32), axis=0)
    tl.store(starts + i_x, below)
    if i_x == X - 1:
        tl.store(starts + X, num_pairs)
    for begin in range(0, num_pairs, BLOCK):
        b_expert = tl.load(expert + begin + o_p, mask=begin + o_p < num_pairs, other=X)
        here = b_expert == i_x
        b_count = here.to(tl.int32)
        b_place = below + tl.cumsum(b_count, axis=0) - 1
        tl.store(pairs + b_place, begin + o_p, mask=here)
        tl.store(places + begin + o_p, b_place, mask=here)
        below += tl.sum(b_count, axis=0)


@triton.jit
def _tile_of(starts, i_work, X: tl.constexpr, NX: tl.constexpr, M: tl.constexpr):
    """Expert, first pair and the pair behind the expert's last of a tile; the number of tiles."""
    o_x = tl.arange(0, NX)
    m_x = o_x < X
    b_start = tl.load(starts + o_x, mask=m_x, other=0)
    b_count = tl.load(starts + o_x + 1, mask=m_x, other=0) - b_start
    b_tiles = tl.where(m_x, tl.cdiv(b_count, M), 0)
    b_until = tl.cumsum(b_tiles, axis=0)
    i_x = tl.sum((b_until <= i_work).to(tl.int32), axis=0)
    here = o_x == i_x
    start = tl.sum(tl.where(here, b_start, 0), axis=0)
    count = tl.sum(tl.where(here, b_count, 0), axis=0)
    before = tl.sum(tl.where(here, b_until - b_tiles, 0), axis=0)
    first = start + (i_work - before) * M
    return i_x, first, start + count, tl.sum(b_tiles, axis=0)


@triton.jit
def _gated(
    b_gate, b_up, clamp, alpha, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, OAI: tl.constexpr
):
    if CLAMP:
        b_gate = tl.minimum(b_gate, clamp)
        b_up = tl.minimum(tl.maximum(b_up, -clamp), clamp)
    if OAI:
        return b_gate * tl.sigmoid(alpha * b_gate) * (b_up + 1.0)
    return activate(b_gate, ACTIVATION) * b_up


@triton.jit
def up_kernel(
    x, up, bias, pairs, starts, inner, clamp, alpha, SLOTS: tl.constexpr, X: tl.constexpr,
    NX: tl.constexpr, E: tl.constexpr, I: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, OAI: tl.constexpr,
    BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: any. inner [P, I] of the sorted pairs."""
    enter(DEPENDENT)
    COLUMNS: tl.constexpr = (I + N - 1) // N
    _, _, _, tiles = _tile_of(starts, 0, X, NX, M)
    o_k = tl.arange(0, K)
    for i_work in range(tl.program_id(0), tiles * COLUMNS, tl.num_programs(0)):
        i_x, first, end, _ = _tile_of(starts, i_work // COLUMNS, X, NX, M)
        o_p = first + tl.arange(0, M)
        m_p = o_p < end
        o_n = i_work % COLUMNS * N + tl.arange(0, N)
        m_n = o_n < I
        b_token = tl.load(pairs + o_p, mask=m_p, other=0) // SLOTS
        p_x = x + b_token.to(tl.int64)[:, None] * E + o_k[None, :]
        p_gate = up + (i_x.to(tl.int64) * (2 * I) + o_n[None, :]) * E + o_k[:, None]
        b_gate = tl.zeros([M, N], tl.float32)
        b_up = tl.zeros([M, N], tl.float32)
        for begin in range(0, E, K):
            m_k = begin + o_k < E
            m_w = m_n[None, :] & m_k[:, None]
            b_x = tl.load(p_x + begin, mask=m_p[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_gate + begin, mask=m_w, other=0.0)
            b_gate = tl.dot(b_x, b_w, b_gate, input_precision="ieee")
            b_w = tl.load(p_gate + I * E + begin, mask=m_w, other=0.0)
            b_up = tl.dot(b_x, b_w, b_up, input_precision="ieee")
        if BIAS:
            p_bias = bias + i_x * (2 * I) + o_n
            b_gate += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[None, :]
            b_up += tl.load(p_bias + I, mask=m_n, other=0.0).to(tl.float32)[None, :]
        b_h = _gated(b_gate, b_up, clamp, alpha, ACTIVATION, CLAMP, OAI)
        p_h = inner + o_p.to(tl.int64)[:, None] * I + o_n[None, :]
        tl.store(p_h, b_h.to(inner.dtype.element_ty), mask=m_p[:, None] & m_n[None, :])


@triton.jit
def down_kernel(
    inner, down, bias, starts, out, X: tl.constexpr, NX: tl.constexpr, E: tl.constexpr,
    I: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: any. out [P, E] of the sorted pairs, not weighted."""
    enter(DEPENDENT)
    COLUMNS: tl.constexpr = (E + N - 1) // N
    _, _, _, tiles = _tile_of(starts, 0, X, NX, M)
    o_k = tl.arange(0, K)
    for i_work in range(tl.program_id(0), tiles * COLUMNS, tl.num_programs(0)):
        i_x, first, end, _ = _tile_of(starts, i_work // COLUMNS, X, NX, M)
        o_p = first + tl.arange(0, M)
        m_p = o_p < end
        o_n = i_work % COLUMNS * N + tl.arange(0, N)
        m_n = o_n < E
        p_h = inner + o_p.to(tl.int64)[:, None] * I + o_k[None, :]
        p_w = down + (i_x.to(tl.int64) * E + o_n[None, :]) * I + o_k[:, None]
        b_acc = tl.zeros([M, N], tl.float32)
        for begin in range(0, I, K):
            m_k = begin + o_k < I
            b_h = tl.load(p_h + begin, mask=m_p[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + begin, mask=m_n[None, :] & m_k[:, None], other=0.0)
            b_acc = tl.dot(b_h, b_w, b_acc, input_precision="ieee")
        if BIAS:
            p_bias = bias + i_x * E + o_n
            b_acc += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[None, :]
        p_y = out + o_p.to(tl.int64)[:, None] * E + o_n[None, :]
        tl.store(p_y, b_acc.to(out.dtype.element_ty), mask=m_p[:, None] & m_n[None, :])


@triton.jit
def combine_kernel(
    out, weight, places, y, SLOTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of their outputs. Slots are added up in order."""
    enter(DEPENDENT)
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < E
    b_sum = tl.zeros([BLOCK], tl.float32)
    for k in range(0, SLOTS):
        place = tl.load(places + i_t * SLOTS + k).to(tl.int64)
        b_out = tl.load(out + place * E + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_sum = tl.fma(b_out, tl.zeros_like(b_out) + tl.load(weight + i_t * SLOTS + k), b_sum)
    tl.store(y + i_t * E + o_e, b_sum.to(y.dtype.element_ty), mask=m_e)


def bind(
    problem: ExpertsProblem,
    up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The kernels for one layer; keeps the weights."""
    up_XIE, down_XEI = up_XIE.contiguous(), down_XEI.contiguous()
    slots, count, width, inner = problem.slots, problem.experts, problem.width, problem.inner
    sizes = {"X": count, "NX": power_of_two(count), "E": width, "I": inner}
    tile = {"N": OUTPUTS, "K": INPUTS, "num_warps": 4, "num_stages": 3}
    if problem.dtype is torch.float32:
        tile["num_stages"] = 1
    is_oai = problem.activation == SWIGLU_OAI
    few = FEW if has_known_products() and problem.dtype is not torch.float32 else MANY

    def experts(
        x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        assert x_TE.dtype == problem.dtype and x_TE.is_contiguous(), (x_TE.dtype, x_TE.stride())
        assert expert_TK.is_contiguous() and weight_TK.is_contiguous(), expert_TK.stride()
        num_tokens, device = x_TE.shape[0], x_TE.device
        pairs = num_tokens * slots
        assert expert_TK.shape == weight_TK.shape == (num_tokens, slots), expert_TK.shape
        order = expert_TK.new_empty(2 * pairs + count + 1)
        sorted_P, place_P, start_X1 = order.split_with_sizes((pairs, pairs, count + 1))
        common, m = launch(device), few if pairs <= FEW * count else MANY
        programs = (num_sms(device) * PROGRAMS_PER_SM,)
        sort_kernel[(count,)](
            expert_TK, sorted_P, place_P, start_X1, pairs, X=count, BLOCK=SORTED, num_warps=4,
            **common,
        )  # fmt: skip
        inner_PI = x_TE.new_empty((pairs, inner))
        up_kernel[programs](
            x_TE, up_XIE, up_bias_XI, sorted_P, start_X1, inner_PI, problem.clamp, OAI_ALPHA,
            SLOTS=slots, M=m, ACTIVATION="silu" if is_oai else problem.activation,
            CLAMP=problem.clamp > 0, OAI=is_oai, BIAS=problem.bias, **sizes, **tile, **common,
        )  # fmt: skip
        out_PE = x_TE.new_empty((pairs, width))
        down_kernel[programs](
            inner_PI, down_XEI, down_bias_XE, start_X1, out_PE, M=m, BIAS=problem.bias, **sizes,
            **tile, **common,
        )  # fmt: skip
        y_TE = x_TE.new_empty(x_TE.shape)
        combine_kernel[(num_tokens, triton.cdiv(width, ADDED))](
            out_PE, weight_TK, place_P, y_TE, SLOTS=slots, E=width, BLOCK=ADDED, num_warps=4,
            **common,
        )  # fmt: skip
        return y_TE

    return experts


def _supports(problem: ExpertsProblem) -> str | None:
    if problem.experts > MAX_EXPERTS:
        return f"knows {MAX_EXPERTS} experts at most"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
