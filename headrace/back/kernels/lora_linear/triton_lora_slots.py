"""Adapters of few rows in Triton, a program for each slot: its rows are multiplied together, so
that A and B are read once for all of them. `shrink`, z = A x in parts over the inputs, and
`expand`, y += scale * B z.

What a program reads of A or B comes before it waits for the kernel in front of it: no step writes
slots that its rows have. A program whose slot no row has ends at once, behind the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.lora_linear.op import LoraLinear, LoraLinearProblem, LoraWeights
from headrace.back.kernels.lora_linear.triton_lora_linear import tiles_of
from headrace.back.kernels.triton.wrap import launch, power_of_two

MOST_POLLS = 1 << 22
"""Seconds: programs that never come must not hang the device."""


@dataclass(frozen=True, kw_only=True)
class SlotTiles:
    """`inputs` and `ranks` of a program of A, at most `splits` of them; `outputs` of one of B,
    which goes over its ranks in steps of `depth`."""

    inputs: int = 512
    splits: int = 16
    ranks: int = 32
    outputs: int = 128
    depth: int = 16
    warps: int = 4


@triton.jit
def _shrink(
    i_slot,
    i_tile,
    i_split,
    x,
    slots,
    a,
    rank,
    z,
    num_rows,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    STEPS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Ranks of one part and slot over some inputs, with the wait inside; whether there were any."""
    i_part = i_tile % PARTS
    o_r = i_tile // PARTS * BR + tl.arange(0, BR)
    o_t = tl.arange(0, BT)
    b_slot = tl.load(slots + o_t, mask=o_t < num_rows, other=0)
    m_t = b_slot == i_slot + 1
    i_weight = (i_slot * PARTS + i_part).to(tl.int64)
    m_r = o_r < tl.load(rank + i_weight)
    used = (tl.max(m_t.to(tl.int32), axis=0) > 0) & (tl.max(m_r.to(tl.int32), axis=0) > 0)
    o_i = i_split * STEPS * BI + tl.arange(0, BI)
    p_a = a + (i_weight * MOST + o_r)[None, :] * INPUTS
    b_a = tl.load(p_a + o_i[:, None], mask=m_r[None, :] & (o_i < INPUTS)[:, None] & used, other=0.0)
    if DEPENDENT:
        gdc_wait()
    if used:
        p_x = x + o_t.to(tl.int64)[:, None] * x_stride
        b_x = tl.load(p_x + o_i[None, :], mask=m_t[:, None] & (o_i < INPUTS)[None, :], other=0.0)
        b_z = tl.dot(b_x, b_a, input_precision="ieee")
        for step in range(1, STEPS):
            o_s = o_i + step * BI
            m_s = o_s < INPUTS
            b_a = tl.load(p_a + o_s[:, None], mask=m_r[None, :] & m_s[:, None], other=0.0)
            b_x = tl.load(p_x + o_s[None, :], mask=m_t[:, None] & m_s[None, :], other=0.0)
            b_z = tl.dot(b_x, b_a, b_z, input_precision="ieee")
        p_z = z + ((i_split * num_rows + o_t[:, None]) * PARTS + i_part) * MOST + o_r[None, :]
        tl.store(p_z, b_z, mask=m_t[:, None] & m_r[None, :])
    return used


@triton.jit
def shrink_slot_kernel(
    x,
    slots,
    a,
    rank,
    z,
    num_rows,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    STEPS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (slots, parts * tiles of ranks, splits); z float32 [splits, rows, parts, MOST]."""
    if DEPENDENT:
        gdc_launch_dependents()
    _shrink(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), x, slots, a, rank, z, num_rows,
        x_stride, INPUTS, PARTS, MOST, STEPS, BT, BR, BI, DEPENDENT,
    )  # fmt: skip


@triton.jit
def _z_tile(p_z, m_z, stride, SPLITS: tl.constexpr):
    """Float32 [BT, BR]: the sums of all splits."""
    b_z = tl.load(p_z, mask=m_z, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SPLITS):
        b_z += tl.load(p_z + i * stride, mask=m_z, other=0.0)
    return b_z


@triton.jit
def _expand(
    i_slot,
    i_tile,
    done,
    wanted,
    z,
    slots,
    b,
    scale,
    rank,
    turn,
    tiles,
    y,
    num_rows,
    y_stride,
    z_row,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    OF_ALL: tl.constexpr,
    TURNED: tl.constexpr,
    POLLS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some outputs of one slot, with the wait inside, and with POLLS that for `wanted` programs
    that have counted up `done`; whether any row has the slot."""
    i_part = tl.load(tiles + i_tile * 3)
    o_o = tl.load(tiles + i_tile * 3 + 1) + tl.arange(0, BO)
    m_o = o_o < tl.load(tiles + i_tile * 3 + 2)
    o_t = tl.arange(0, BT)
    b_slot = tl.load(slots + o_t, mask=o_t < num_rows, other=0)
    m_t = b_slot == i_slot + 1
    i_weight = i_slot * PARTS + i_part
    num_ranks = tl.load(rank + i_weight)
    has = tl.max(m_t.to(tl.int32), axis=0) > 0
    used = has & (num_ranks > 0)
    o_r = tl.arange(0, BR)
    p_b = b + (i_slot * MOST + o_r).to(tl.int64)[:, None] * OUTPUTS + o_o[None, :]
    b_b = tl.load(p_b, mask=(o_r < num_ranks)[:, None] & m_o[None, :] & used, other=0.0)
    if DEPENDENT:
        gdc_wait()
    if used:
        p_y = y + o_t.to(tl.int64)[:, None] * y_stride + o_o[None, :]
        m_y = m_t[:, None] & m_o[None, :]
        b_y = tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
        if TURNED:
            p_turn = turn + i_slot * 2 * OUTPUTS + o_o
            b_factor = tl.load(p_turn, mask=m_o, other=1.0)
            b_shift = tl.load(p_turn + OUTPUTS, mask=m_o, other=0.0)
            b_y = b_y * b_factor[None, :] + b_shift[None, :]
        factor = tl.load(scale + i_weight)
        p_z = z + i_part * MOST + o_t[:, None] * z_row + o_r[None, :]
        if OF_ALL:
            p_z += i_slot * PARTS * MOST
        if POLLS:
            polls = 0
            while (tl.atomic_add(done + i_slot, 0, sem="acquire") < wanted) & (polls < POLLS):
                polls += 1
        m_z = m_t[:, None] & (o_r < num_ranks)[None, :]
        b_z = _z_tile(p_z, m_z, num_rows * z_row, SPLITS)
        b_y = tl.dot((b_z * factor).to(b_b.dtype), b_b, b_y, input_precision="ieee")
        for r in range(BR, num_ranks, BR):
            m_r = o_r < num_ranks - r
            b_b = tl.load(p_b + r * OUTPUTS, mask=m_r[:, None] & m_o[None, :], other=0.0)
            m_z = m_t[:, None] & m_r[None, :]
            b_z = _z_tile(p_z + r, m_z, num_rows * z_row, SPLITS)
            b_y = tl.dot((b_z * factor).to(b_b.dtype), b_b, b_y, input_precision="ieee")
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)
    return has


@triton.jit
def expand_slot_kernel(
    z,
    slots,
    b,
    scale,
    rank,
    turn,
    tiles,
    y,
    num_rows,
    y_stride,
    z_row,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    OF_ALL: tl.constexpr,
    TURNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (slots, tiles of outputs). OF_ALL: z [rows, slots, parts, MOST] holds those of all
    slots."""
    if DEPENDENT:
        gdc_launch_dependents()
    _expand(
        tl.program_id(0), tl.program_id(1), rank, 0, z, slots, b, scale, rank, turn, tiles, y, num_rows,
        y_stride, z_row, OUTPUTS, PARTS, MOST, SPLITS, BT, BR, BO, OF_ALL, TURNED, 0, DEPENDENT,
    )  # fmt: skip


@triton.jit
def both_slot_kernel(
    x,
    a,
    done,
    z,
    slots,
    b,
    scale,
    rank,
    turn,
    tiles,
    y,
    num_rows,
    x_stride,
    y_stride,
    z_row,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    OF_ALL: tl.constexpr,
    TURNED: tl.constexpr,
    INPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    SHRINK_BR: tl.constexpr,
    BI: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK_TILES: tl.constexpr,
    TILES: tl.constexpr,
    POLLS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (slots * RANK_TILES * SPLITS + slots * TILES): those that shrink, and behind them those
    that expand, which wait for the others of their slot. Programs begin in the order of their
    numbers, and who shrinks waits for nobody. `done` int32 [2 * slots]: how many have shrunk and
    expanded, set back to zero by the last."""
    if DEPENDENT:
        gdc_launch_dependents()
    i = tl.program_id(0)
    if i < SLOTS * RANK_TILES * SPLITS:
        i_slot = i % SLOTS
        used = _shrink(
            i_slot, i // SLOTS % RANK_TILES, i // SLOTS // RANK_TILES, x, slots, a, rank, z, num_rows,
            x_stride, INPUTS, PARTS, MOST, STEPS, BT, SHRINK_BR, BI, DEPENDENT,
        )  # fmt: skip
        if used:
            tl.debug_barrier()  # all of the program's values are there before it counts
            tl.atomic_add(done + i_slot, 1, sem="release")
    else:
        j = i - SLOTS * RANK_TILES * SPLITS
        i_slot = j % SLOTS
        wanted = 0
        for i_part in tl.static_range(PARTS):
            wanted += tl.cdiv(tl.load(rank + i_slot * PARTS + i_part), SHRINK_BR) * SPLITS
        has = _expand(
            i_slot, j // SLOTS, done, wanted, z, slots, b, scale, rank, turn, tiles, y, num_rows, y_stride,
            z_row, OUTPUTS, PARTS, MOST, SPLITS, BT, BR, BO, OF_ALL, TURNED, POLLS, DEPENDENT,
        )  # fmt: skip
        if has:
            ended = tl.atomic_add(done + SLOTS + i_slot, 1)
            if ended == TILES - 1:
                tl.atomic_xchg(done + i_slot, 0)
                tl.atomic_xchg(done + SLOTS + i_slot, 0)


def bind_by_slot(
    problem: LoraLinearProblem, weights: LoraWeights, tiles: SlotTiles = SlotTiles()
) -> LoraLinear:
    """Both kernels, for at most 64 rows."""
    shrink = bind_shrink(problem, weights, tiles)
    splits, _ = _splits(problem, tiles)
    expand = bind_expand(problem, weights, tiles, splits=splits)

    def by_slot(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        expand(shrink(x_TI, slot_T), y_TO, slot_T)

    return by_slot


def bind_at_once(
    problem: LoraLinearProblem, weights: LoraWeights, tiles: SlotTiles = SlotTiles()
) -> LoraLinear:
    """Both in one launch, for at most 64 rows."""
    device, parts, most = weights.a_SKI.device, len(problem.parts), problem.rank
    splits, steps = _splits(problem, tiles)
    table = tiles_of(problem.parts, tiles.outputs).to(device)
    ranks = min(tiles.ranks, power_of_two(most, least=16))
    depth = min(tiles.depth, power_of_two(most, least=16))
    rank_tiles = parts * triton.cdiv(most, ranks)
    done = torch.zeros(2 * problem.slots, dtype=torch.int32, device=device)
    grid = (problem.slots * (rank_tiles * splits + len(table)),)

    def at_once(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        rows = x_TI.shape[0]
        z_STPR = torch.empty((splits, rows, parts, most), dtype=torch.float32, device=device)
        both_slot_kernel[grid](
            x_TI, weights.a_SKI, done, z_STPR, slot_T, weights.b_SRO, weights.scale_SP,
            weights.rank_SP, weights.turn_S2O, table, y_TO, rows, x_TI.stride(0), y_TO.stride(0),
            parts * most, OUTPUTS=problem.outputs, PARTS=parts, MOST=most, SPLITS=splits,
            BT=power_of_two(rows, least=16), BR=depth, BO=tiles.outputs,
            OF_ALL=False, TURNED=problem.turned, INPUTS=problem.inputs, STEPS=steps, SHRINK_BR=ranks,
            BI=tiles.inputs, SLOTS=problem.slots, RANK_TILES=rank_tiles, TILES=len(table), POLLS=MOST_POLLS,
            num_warps=tiles.warps, num_stages=1, **launch(device),
        )  # fmt: skip

    return at_once


def _splits(problem: LoraLinearProblem, tiles: SlotTiles) -> tuple[int, int]:
    """Parts of the inputs, and the steps of each."""
    steps = triton.cdiv(problem.inputs, tiles.inputs * tiles.splits)
    return triton.cdiv(problem.inputs, tiles.inputs * steps), steps


def bind_shrink(
    problem: LoraLinearProblem, weights: LoraWeights, tiles: SlotTiles
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Of x and the slots z float32 [splits, rows, parts, rank]."""
    device, parts, most = weights.a_SKI.device, len(problem.parts), problem.rank
    splits, steps = _splits(problem, tiles)
    ranks = min(tiles.ranks, power_of_two(most, least=16))
    grid = problem.slots, parts * triton.cdiv(most, ranks), splits

    def shrink(x_TI: torch.Tensor, slot_T: torch.Tensor) -> torch.Tensor:
        rows = x_TI.shape[0]
        z_STPR = torch.empty((splits, rows, parts, most), dtype=torch.float32, device=device)
        shrink_slot_kernel[grid](
            x_TI, slot_T, weights.a_SKI, weights.rank_SP, z_STPR, rows, x_TI.stride(0),
            INPUTS=problem.inputs, PARTS=parts, MOST=most, STEPS=steps,
            BT=power_of_two(rows, least=16), BR=ranks, BI=tiles.inputs, num_warps=tiles.warps,
            **launch(device),
        )  # fmt: skip
        return z_STPR

    return shrink


def bind_expand(
    problem: LoraLinearProblem,
    weights: LoraWeights,
    tiles: SlotTiles,
    *,
    splits: int = 1,
    of_all: bool = False,
) -> LoraLinear:
    """Of z (in place of x), y and the slots."""
    device, parts, most = weights.a_SKI.device, len(problem.parts), problem.rank
    table = tiles_of(problem.parts, tiles.outputs).to(device)
    z_row = parts * most * (problem.slots if of_all else 1)
    depth = min(tiles.depth, power_of_two(most, least=16))

    def expand(z: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        rows = y_TO.shape[0]
        expand_slot_kernel[(problem.slots, len(table))](
            z, slot_T, weights.b_SRO, weights.scale_SP, weights.rank_SP, weights.turn_S2O, table,
            y_TO, rows, y_TO.stride(0), z_row, OUTPUTS=problem.outputs, PARTS=parts, MOST=most,
            SPLITS=splits, BT=power_of_two(rows, least=16), BR=depth, BO=tiles.outputs,
            OF_ALL=of_all, TURNED=problem.turned, num_warps=tiles.warps, num_stages=1, **launch(device),
        )  # fmt: skip

    return expand
