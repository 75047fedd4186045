"""Pairs of a token and a slot in the order of their experts, made on the device: the rows that the
grouped GEMMs of every kernel here read.

Each expert's rows begin at a multiple of M, the rows of a tile, so that a tile is of one expert
whole, and a GEMM needs no more than the list of the tiles' experts. Rows between an expert's last
pair and its next multiple are padding: whatever they hold is never read by the combination. Pairs
of one expert keep their order. A pair without an expert has no row, and its place is -1 (ABSENT).

Up to ONE_BLOCK pairs one launch counts, places and copies; more are counted in blocks by a launch
of their own, since each program needs what lies before its own pairs.

P pairs, X experts, K slots of a token, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.back.kernels.linear_fp8.layout import FLOAT8
from headrace.back.kernels.triton.grid import enter, enter_late
from headrace.back.kernels.triton.wrap import interpreted, launch, power_of_two

ONE_BLOCKS = (64, 512, 2048, 4096)
"""Pairs that every program counts for itself, by the size its kernel is compiled for."""
BLOCK_TOKENS = 128
"""Tokens whose pairs are counted together where there are more."""
TOKENS = 8
"""Of a program there."""
COLUMNS = 256
"""Of a token that are copied at a time there."""
BLOCKS = 16
"""Blocks that a program makes the bases of."""
ADDED = 1024
"""Outputs of a token that a program adds up."""


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    expert, counts, num_pairs, NX: tl.constexpr, PAIRS: tl.constexpr, P: tl.constexpr,
    ABSENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of PAIRS, P when padded. counts int32 [blocks, NX]."""
    enter(DEPENDENT)
    o_p = tl.arange(0, P)
    o_pair = tl.program_id(0) * PAIRS + o_p
    m_p = (o_p < PAIRS) & (o_pair < num_pairs)
    b_expert = tl.load(expert + o_pair, mask=m_p, other=0)
    if ABSENT:
        m_p = m_p & (b_expert >= 0)
    b_count = tl.histogram(b_expert, NX, mask=m_p).to(tl.int32)
    tl.store(counts + tl.program_id(0) * NX + tl.arange(0, NX), b_count)


@triton.jit
def _store_tiles(tiles, b_total, b_first, o_x, M: tl.constexpr):
    """The programs' share of the list of tiles: the i-th of every expert is program i's."""
    i_program = tl.program_id(0)
    b_tiles = (b_total + M - 1) // M
    if i_program == 0:
        tl.store(tiles, tl.sum(b_tiles, axis=0))
    for i in range(i_program, tl.max(b_tiles, axis=0), tl.num_programs(0)):
        m_x = i < b_tiles
        p_tile = tiles + 1 + 2 * (b_first + i)
        tl.store(p_tile, o_x, mask=m_x)
        tl.store(p_tile + 1, tl.minimum(b_total - i * M, M), mask=m_x)


@triton.jit(do_not_specialize=["blocks"])
def bases_kernel(
    counts, bases, tiles, blocks, NX: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: STEP blocks each. bases [blocks, NX]: the row of each expert's first pair in a
    block."""
    enter(DEPENDENT)
    o_x = tl.arange(0, NX)
    i_first = tl.program_id(0) * STEP
    b_total = tl.zeros([NX], tl.int32)
    b_before = tl.zeros([NX], tl.int32)
    for begin in range(0, blocks, STEP):
        o_b = begin + tl.arange(0, STEP)
        m_b = (o_b < blocks)[:, None]
        b_count = tl.load(counts + o_b[:, None] * NX + o_x[None, :], mask=m_b, other=0)
        b_sum = tl.sum(b_count, axis=0)
        b_total += b_sum
        b_before += tl.where(begin < i_first, b_sum, 0)
    b_tiles = (b_total + M - 1) // M
    b_first = tl.cumsum(b_tiles, axis=0) - b_tiles
    _store_tiles(tiles, b_total, b_first, o_x, M)
    b_base = b_first * M + b_before
    for i in range(i_first, tl.minimum(i_first + STEP, blocks)):
        tl.store(bases + i * NX + o_x, b_base)
        b_base += tl.load(counts + i * NX + o_x)


@triton.jit
def quantized(b_x, fixed, GROUP: tl.constexpr):
    """Numbers of [R, C] for e4m3, and the scale of each GROUP of them (linear_fp8/layout.py), or
    that of all, which `fixed` [1] holds."""
    R: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1]
    b_wide = tl.reshape(b_x.to(tl.float32), [R, C // GROUP, GROUP])
    b_top = tl.max(tl.abs(b_wide), axis=2)
    if fixed is not None:
        b_scale = tl.zeros_like(b_top) + tl.load(fixed)
        b_scaled = tl.div_rn(b_wide, tl.zeros_like(b_wide) + b_scale[:, :, None])
    else:
        b_scale = tl.div_rn(b_top, 448.0)
        b_inverse = tl.where(b_top > 1e-30, tl.div_rn(448.0, tl.maximum(b_top, 1e-30)), 0.0)
        b_scaled = b_wide * b_inverse[:, :, None]
    b_values = tl.minimum(tl.maximum(b_scaled, -448.0), 448.0)
    b_values = tl.where(b_wide == b_wide, b_values, b_wide)  # a NaN stays one
    return tl.reshape(b_values, [R, C]), b_scale


@triton.jit(do_not_specialize=["num_tokens"])
def dispatch_kernel(
    expert, x, bases, places, rows, row_scales, fixed, tiles, num_tokens,
    NX: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, COUNTED: tl.constexpr, ABSENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: R tokens each. places [T SLOTS]: the row of each pair; rows [., E]: x in that order, if
    GROUP e4m3 numbers of it, with a scale for GROUP columns in row_scales [., ceil(E / GROUP)]
    (that of `fixed`, where it is not None); tiles int32: how many there are, then of each its
    expert, and how many of its rows are pairs. If COUNTED, these are made already, and `bases` of
    blocks of PAIRS; else P, a power of two, is at least all pairs. NX: experts, K: SLOTS, as powers
    of two."""
    enter_late(DEPENDENT)
    GROUPS: tl.constexpr = (E + GROUP - 1) // GROUP if GROUP else 0
    num_pairs = num_tokens * SLOTS
    i_program = tl.program_id(0)
    o_x = tl.arange(0, NX)
    begin = 0
    if COUNTED:
        block = i_program * R * SLOTS // PAIRS
        begin = block * PAIRS
        b_base = tl.load(bases + block * NX + o_x)
    else:
        o_all = tl.arange(0, P)
        m_all = o_all < num_pairs
        b_all = tl.load(expert + o_all, mask=m_all, other=0)
        if ABSENT:
            m_all = m_all & (b_all >= 0)
        b_total = tl.histogram(b_all, NX, mask=m_all).to(tl.int32)
        b_tiles = (b_total + M - 1) // M
        b_first = tl.cumsum(b_tiles, axis=0) - b_tiles
        _store_tiles(tiles, b_total, b_first, o_x, M)
        b_base = b_first * M

    o_r = i_program * R + tl.arange(0, R)
    o_k = tl.arange(0, K)
    o_own = o_r[:, None] * SLOTS + o_k[None, :]
    m_own = (o_r < num_tokens)[:, None] & (o_k < SLOTS)[None, :]
    b_own = tl.load(expert + o_own, mask=m_own, other=0)
    is_own = b_own[:, :, None] == o_x[None, None, :]
    b_place = tl.sum(tl.where(is_own, b_base[None, None, :], 0), axis=2)
    for start in range(begin, (i_program + 1) * R * SLOTS, STEP):
        o_p = start + tl.arange(0, STEP)
        b_other = tl.load(expert + o_p, mask=o_p < num_pairs, other=-1)
        is_before = (o_p[None, None, :] < o_own[:, :, None]) & (
            b_other[None, None, :] == b_own[:, :, None]
        )
        b_place += tl.sum(is_before.to(tl.int32), axis=2)
    if ABSENT:
        b_place = tl.where(b_own < 0, -1, b_place)
    tl.store(places + o_own, b_place, mask=m_own)
    for column in range(0, E, C):
        o_e = column + tl.arange(0, C)
        m_e = (o_r < num_tokens)[:, None] & (o_e < E)[None, :]
        b_x = tl.load(x + o_r.to(tl.int64)[:, None] * E + o_e[None, :], mask=m_e, other=0.0)
        if GROUP:
            b_x, b_scale = quantized(b_x, fixed, GROUP)
            o_g = column // GROUP + tl.arange(0, C // GROUP)
            m_g = (o_r < num_tokens)[:, None] & (o_g < GROUPS)[None, :]
        for k in tl.static_range(SLOTS):
            b_row = tl.sum(tl.where(o_k[None, :] == k, b_place, 0), axis=1).to(tl.int64)
            p_row = rows + b_row[:, None] * E + o_e[None, :]
            m_k = m_e & (b_row >= 0)[:, None] if ABSENT else m_e
            tl.store(p_row, b_x.to(rows.dtype.element_ty), mask=m_k)
            if GROUP:
                m_s = m_g & (b_row >= 0)[:, None] if ABSENT else m_g
                tl.store(row_scales + b_row[:, None] * GROUPS + o_g[None, :], b_scale, mask=m_s)


@triton.jit
def combine_kernel(
    out, weight, places, y, y_stride, SLOTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    ABSENT: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of their outputs. Slots are added up in order; with ADD y is the
    residual."""
    enter(DEPENDENT)
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < E
    b_sum = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(SLOTS):
        place = tl.load(places + i_t * SLOTS + k).to(tl.int64)
        m_k = m_e & (place >= 0) if ABSENT else m_e
        b_out = tl.load(out + place * E + o_e, mask=m_k, other=0.0).to(tl.float32)
        b_sum = tl.fma(b_out, tl.zeros_like(b_out) + tl.load(weight + i_t * SLOTS + k), b_sum)
    p_y = y + i_t * y_stride + o_e
    if ADD:
        b_sum += tl.load(p_y, mask=m_e, other=0.0).to(tl.float32)
    tl.store(p_y, b_sum.to(y.dtype.element_ty), mask=m_e)


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """places int32 [P], rows [rows, E], scales of quantized ones, tiles as in `dispatch_kernel`."""

    places_P: torch.Tensor
    rows_NE: torch.Tensor
    tiles: torch.Tensor
    scales_NG: torch.Tensor | None = None


def dispatched(
    x_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    *,
    experts: int,
    m: int,
    group: int = 0,
    scale_1: torch.Tensor | None = None,
    absent: bool = False,
) -> Dispatched:
    """Launches the dispatch to tiles of `m` rows; with a `group` of columns, rows are e4m3 numbers
    with a scale for so many. `scale_1`: the same scale for all. `absent`: see op experts."""
    (num_tokens, slots), width = expert_TK.shape, x_TE.shape[1]
    pairs, padded, common = num_tokens * slots, power_of_two(experts), launch(x_TE.device)
    most_tiles = pairs // m + min(experts, pairs)
    is_counted = pairs > ONE_BLOCKS[-1]
    block = BLOCK_TOKENS * slots
    blocks = triton.cdiv(pairs, block)
    # Each part begins at 16 bytes: kernels are compiled for that.
    table = blocks * padded if is_counted else 0
    sizes = [-(-size // 4) * 4 for size in (pairs, 1 + 2 * most_tiles, table, table)]
    places_P, tiles, counts, bases = expert_TK.new_empty(sum(sizes)).split_with_sizes(sizes)
    # The interpreter does not round to the nearest e4m3 number: there torch does.
    dtype = torch.float32 if interpreted() else FLOAT8
    rows_NE = x_TE.new_empty((most_tiles * m, width), dtype=dtype if group else x_TE.dtype)
    scales_NG = None
    if group:
        groups = triton.cdiv(width, group)
        scales_NG = x_TE.new_empty((most_tiles * m, groups), dtype=torch.float32)
    p = power_of_two(block) if is_counted else next(size for size in ONE_BLOCKS if size >= pairs)
    if is_counted:
        count_kernel[(blocks,)](
            expert_TK,
            counts,
            pairs,
            NX=padded,
            PAIRS=block,
            P=p,
            ABSENT=absent,
            num_warps=4,
            **common,
        )
        bases_kernel[(triton.cdiv(blocks, BLOCKS),)](
            counts, bases, tiles, blocks, NX=padded, M=m, STEP=BLOCKS, num_warps=4, **common
        )
    r = TOKENS if is_counted else 1
    dispatch_kernel[(triton.cdiv(num_tokens, r),)](
        expert_TK, x_TE, bases, places_P, rows_NE, scales_NG, scale_1, tiles, num_tokens, NX=padded,
        SLOTS=slots, K=power_of_two(slots), E=width, M=m, R=r, PAIRS=block, P=p,
        STEP=128 if is_counted else min(1024, p), C=COLUMNS if is_counted else power_of_two(width, least=group),
        GROUP=group, COUNTED=is_counted, ABSENT=absent, num_warps=4, **common,
    )  # fmt: skip
    rows_NE = rows_NE.to(FLOAT8) if group else rows_NE
    return Dispatched(places_P=places_P[:pairs], rows_NE=rows_NE, tiles=tiles, scales_NG=scales_NG)


def combined(
    out_NE: torch.Tensor,
    weight_TK: torch.Tensor,
    places_P: torch.Tensor,
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None = None,
    *,
    absent: bool = False,
) -> torch.Tensor:
    """y_TE: each token's weighted sum of its pairs' results, or the residual with it."""
    y_TE = result_for(x_TE, residual_TE)
    num_tokens, width = x_TE.shape
    combine_kernel[(num_tokens, triton.cdiv(width, ADDED))](
        out_NE, weight_TK, places_P, y_TE, y_TE.stride(0), SLOTS=weight_TK.shape[1], E=width,
        BLOCK=ADDED, ABSENT=absent, ADD=residual_TE is not None, num_warps=4,
        **launch(x_TE.device),
    )  # fmt: skip
    return y_TE


def result_for(x_TE: torch.Tensor, residual_TE: torch.Tensor | None) -> torch.Tensor:
    """Where results go: the residual, or new memory."""
    if residual_TE is None:
        return x_TE.new_empty(x_TE.shape)
    assert residual_TE.shape == x_TE.shape and residual_TE.stride(1) == 1, residual_TE.stride()
    return residual_TE
