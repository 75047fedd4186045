"""Adapters of few rows in Triton, a program for each slot: its rows are multiplied together, so
that A and B are read once for all of them. `shrink`, z = A x in parts over the inputs, and
`expand`, y += scale * B z.

What a program reads of A or B is asked for before it waits for the kernel in front of it: no step
writes slots that its rows have. A program whose slot no row has ends at once, behind the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.lora_linear import triton_lora_linear
from headrace.back.kernels.lora_linear.op import LoraLinear, LoraLinearProblem, LoraWeights
from headrace.back.kernels.lora_linear.triton_lora_linear import FEW_ROWS, tiles_of
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import prefetch
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

MOST_SLOTS = 64
"""Of more of them most programs would end at once."""
LINE_BYTES = 128
"""What one prefetch asks for."""


@dataclass(frozen=True, kw_only=True)
class SlotTiles:
    """`inputs` and `ranks` of a program of A, at most `splits` of them; `outputs` of one of B,
    which goes over its ranks in steps of `depth`."""

    inputs: int = 512
    splits: int = 16
    ranks: int = 16
    outputs: int = 256
    depth: int = 16
    warps: int = 4


TILES = SlotTiles()
WIDE_TILES = SlotTiles(inputs=64, outputs=64)
"""Of float32."""


@triton.jit
def _rows(m_t, o_t, first, BM: tl.constexpr):
    """Of those rows, in order, the first-th and the ones behind it."""
    b_place = tl.cumsum(m_t.to(tl.int32), axis=0) - 1
    m_mt = m_t[None, :] & (b_place[None, :] == (first + tl.arange(0, BM))[:, None])
    return tl.sum(tl.where(m_mt, o_t[None, :], 0), axis=1)


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
    BM: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (slots, parts * tiles of ranks, splits); z float32 [splits, rows, parts, MOST]. LINE:
    values of a line."""
    if DEPENDENT:
        gdc_launch_dependents()
    slot = tl.program_id(0) + 1
    i_part = tl.program_id(1) % PARTS
    i_split = tl.program_id(2)
    o_r = tl.program_id(1) // PARTS * BR + tl.arange(0, BR)
    o_t = tl.arange(0, BT)
    m_t = tl.load(slots + o_t, mask=o_t < num_rows, other=0) == slot
    i_weight = ((slot - 1) * PARTS + i_part).to(tl.int64)
    m_r = o_r < tl.load(rank + i_weight)
    members = tl.sum(m_t.to(tl.int32), axis=0)
    used = (members > 0) & (tl.max(m_r.to(tl.int32), axis=0) > 0)
    p_a = a + (i_weight * MOST + tl.where(m_r, o_r, 0)) * INPUTS
    first = i_split * STEPS * BI
    if DEPENDENT:
        if used:
            o_l = tl.minimum(first + tl.arange(0, LINES) * LINE, INPUTS - 1)
            prefetch(p_a[:, None] + o_l[None, :])
        gdc_wait()
    if used:
        for begin in range(0, members, BM):
            b_row = _rows(m_t, o_t, begin, BM)
            m_m = begin + tl.arange(0, BM) < members
            b_z = tl.zeros([BM, BR], tl.float32)
            for step in range(STEPS):
                o_i = first + step * BI + tl.arange(0, BI)
                m_i = o_i < INPUTS
                p_x = x + b_row.to(tl.int64)[:, None] * x_stride + o_i[None, :]
                b_x = tl.load(p_x, mask=m_m[:, None] & m_i[None, :], other=0.0)
                b_a = tl.load(
                    p_a[None, :] + o_i[:, None], mask=m_r[None, :] & m_i[:, None], other=0.0
                )
                b_z = tl.dot(b_x, b_a, b_z, input_precision="ieee")
            p_z = z + ((i_split * num_rows + b_row[:, None]) * PARTS + i_part) * MOST + o_r[None, :]
            tl.store(p_z, b_z, mask=m_m[:, None] & m_r[None, :])


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
    BM: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    OF_ALL: tl.constexpr,
    TURNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (slots, tiles of outputs). OF_ALL: z [rows, slots, parts, MOST] holds those of all
    slots."""
    if DEPENDENT:
        gdc_launch_dependents()
    i_slot = tl.program_id(0)
    i_part = tl.load(tiles + tl.program_id(1) * 3)
    first = tl.load(tiles + tl.program_id(1) * 3 + 1)
    o_o = first + tl.arange(0, BO)
    m_o = o_o < tl.load(tiles + tl.program_id(1) * 3 + 2)
    o_t = tl.arange(0, BT)
    m_t = tl.load(slots + o_t, mask=o_t < num_rows, other=0) == i_slot + 1
    i_weight = i_slot * PARTS + i_part
    num_ranks = tl.load(rank + i_weight)
    members = tl.sum(m_t.to(tl.int32), axis=0)
    used = (members > 0) & (num_ranks > 0)
    o_r = tl.arange(0, BR)
    p_b = b + (i_slot * MOST + o_r).to(tl.int64)[:, None] * OUTPUTS
    if DEPENDENT:
        if used:
            o_l = tl.minimum(first + tl.arange(0, LINES) * LINE, OUTPUTS - 1)
            prefetch(tl.where((o_r < num_ranks)[:, None], p_b, b) + o_l[None, :])
        gdc_wait()
    if used:
        factor = tl.load(scale + i_weight)
        for begin in range(0, members, BM):
            b_row = _rows(m_t, o_t, begin, BM)
            m_m = begin + tl.arange(0, BM) < members
            p_y = y + b_row.to(tl.int64)[:, None] * y_stride + o_o[None, :]
            m_y = m_m[:, None] & m_o[None, :]
            b_y = tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
            if TURNED:
                p_turn = turn + i_slot * 2 * OUTPUTS + o_o
                b_factor = tl.load(p_turn, mask=m_o, other=1.0)
                b_shift = tl.load(p_turn + OUTPUTS, mask=m_o, other=0.0)
                b_y = b_y * b_factor[None, :] + b_shift[None, :]
            p_z = z + i_part * MOST + b_row[:, None] * z_row + o_r[None, :]
            if OF_ALL:
                p_z += i_slot * PARTS * MOST
            for r in range(0, num_ranks, BR):
                m_r = o_r < num_ranks - r
                m_z = m_m[:, None] & m_r[None, :]
                b_z = tl.load(p_z + r, mask=m_z, other=0.0).to(tl.float32)
                for i in tl.static_range(1, SPLITS):
                    b_z += tl.load(p_z + r + i * num_rows * z_row, mask=m_z, other=0.0)
                m_b = m_r[:, None] & m_o[None, :]
                b_b = tl.load(p_b + r * OUTPUTS + o_o[None, :], mask=m_b, other=0.0)
                b_y = tl.dot((b_z * factor).to(b_b.dtype), b_b, b_y, input_precision="ieee")
            tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


def bind_by_slot(
    problem: LoraLinearProblem, weights: LoraWeights, tiles: SlotTiles | None = None
) -> LoraLinear:
    """Both kernels, for at most FEW_ROWS rows."""
    if tiles is None:
        tiles = WIDE_TILES if problem.dtype is torch.float32 else TILES
    shrink = bind_shrink(problem, weights, tiles)
    expand = bind_expand(problem, weights, tiles, splits=splits_of(problem, tiles)[0])

    def by_slot(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        expand(shrink(x_TI, slot_T), y_TO, slot_T)

    return by_slot


def splits_of(problem: LoraLinearProblem, tiles: SlotTiles) -> tuple[int, int]:
    """Parts of the inputs, and the steps of each."""
    steps = triton.cdiv(problem.inputs, tiles.inputs * tiles.splits)
    return triton.cdiv(problem.inputs, tiles.inputs * steps), steps


def bind_shrink(
    problem: LoraLinearProblem, weights: LoraWeights, tiles: SlotTiles
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Of x and the slots z float32 [splits, rows, parts, rank]."""
    device, parts, most = weights.a_SKI.device, len(problem.parts), problem.rank
    splits, steps = splits_of(problem, tiles)
    ranks = min(tiles.ranks, power_of_two(most, least=16))
    line = LINE_BYTES // problem.dtype.itemsize
    grid = problem.slots, parts * triton.cdiv(most, ranks), splits

    def shrink(x_TI: torch.Tensor, slot_T: torch.Tensor) -> torch.Tensor:
        rows = x_TI.shape[0]
        z_STPR = torch.empty((splits, rows, parts, most), dtype=torch.float32, device=device)
        shrink_slot_kernel[grid](
            x_TI, slot_T, weights.a_SKI, weights.rank_SP, z_STPR, rows, x_TI.stride(0),
            INPUTS=problem.inputs, PARTS=parts, MOST=most, STEPS=steps,
            BT=power_of_two(rows, least=16), BM=16, BR=ranks, BI=tiles.inputs,
            LINE=line, LINES=max(1, tiles.inputs // line), num_warps=tiles.warps, num_stages=1,
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
    line = LINE_BYTES // problem.dtype.itemsize
    depth = min(tiles.depth, power_of_two(most, least=16))

    def expand(z: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        rows = y_TO.shape[0]
        expand_slot_kernel[(problem.slots, len(table))](
            z, slot_T, weights.b_SRO, weights.scale_SP, weights.rank_SP, weights.turn_S2O, table,
            y_TO, rows, y_TO.stride(0), z_row, OUTPUTS=problem.outputs, PARTS=parts, MOST=most,
            SPLITS=splits, BT=power_of_two(rows, least=16), BM=16, BR=depth, BO=tiles.outputs,
            LINE=line, LINES=max(1, tiles.outputs // line), OF_ALL=of_all, TURNED=problem.turned,
            num_warps=tiles.warps, num_stages=1, **launch(device),
        )  # fmt: skip

    return expand


def bind(problem: LoraLinearProblem, weights: LoraWeights) -> LoraLinear:
    """Few rows by their slots, many as triton_lora_linear does."""
    few, many = bind_by_slot(problem, weights), triton_lora_linear.bind(problem, weights)

    def lora_linear(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TO.stride(1) == 1, (x_TI.stride(), y_TO.stride())
        if x_TI.shape[0]:
            (few if x_TI.shape[0] <= FEW_ROWS else many)(x_TI, y_TO, slot_T)

    return lora_linear


def _supports(problem: LoraLinearProblem) -> str | None:
    if problem.slots > MOST_SLOTS:
        return f"takes at most {MOST_SLOTS} slots"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton by slot", supports=_supports, bind=bind, invariant=False)
