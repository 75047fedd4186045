"""Adapters of rows in Triton, in two launches: shrink, z = scale * A x into float32, and expand,
y += B z.

Of few rows each program has one, and a part of its inputs or outputs: rows of one adapter read it
again from the second-level cache, which costs less than what tiles of such rows lack in programs
(on an H200 a decode of 32 rows of an 8B model took ten times as long by tiles). Partial sums over
the inputs are added by whoever expands them.

Of many rows a program has a tile and goes over the slots between the least and the greatest among
them; rows of other slots count as zeros meanwhile. A prompt's tile has one slot.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from headrace.back.kernels.lora_linear.op import (
    LoraLinear,
    LoraLinearProblem,
    LoraWeights,
    check_weights,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

FEW_ROWS = 64
"""Up to so many rows each has programs of its own."""
TILE_SLOTS = 512
"""Of more slots (those of experts) tiles would hold rows of many: each row has programs of its
own."""
ROWS = 64
"""Rows of a tile."""
SPLIT = 512
"""Inputs of a program of one row."""
ROW_OUTPUTS = 512
OUTPUTS = 128
"""Outputs of a program, of one row and of a tile."""
INPUTS = 64


@triton.jit
def shrink_row_kernel(
    x,
    slots,
    a,
    scale,
    rank,
    z,
    num_rows,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    i_row = tl.program_id(0)
    i_part = tl.program_id(1) % PARTS
    o_r = tl.program_id(1) // PARTS * BR + tl.arange(0, BR)
    i_split = tl.program_id(2)
    slot = tl.load(slots + i_row)
    if slot > 0:
        i_weight = ((slot - 1) * PARTS + i_part).to(tl.int64)
        num_ranks = tl.load(rank + i_weight)
        if tl.program_id(1) // PARTS * BR < num_ranks:
            m_r = o_r < num_ranks
            o_i = i_split * BI + tl.arange(0, BI)
            m_i = o_i < INPUTS
            b_x = tl.load(x + i_row.to(tl.int64) * x_stride + o_i, mask=m_i, other=0.0)
            p_a = a + (i_weight * MOST + o_r)[:, None] * INPUTS + o_i[None, :]
            b_a = tl.load(p_a, mask=m_r[:, None] & m_i[None, :], other=0.0)
            b_z = tl.sum(b_a.to(tl.float32) * b_x.to(tl.float32)[None, :], axis=1)
            p_z = z + ((i_split * num_rows + i_row) * PARTS + i_part) * MOST + o_r
            tl.store(p_z, b_z * tl.load(scale + i_weight), mask=m_r)


@triton.jit
def expand_row_kernel(
    z,
    slots,
    b,
    rank,
    turn,
    tiles,
    y,
    num_rows,
    y_stride,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    TURNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    i_row = tl.program_id(0)
    i_part = tl.load(tiles + tl.program_id(1) * 3)
    o_o = tl.load(tiles + tl.program_id(1) * 3 + 1) + tl.arange(0, BO)
    m_o = o_o < tl.load(tiles + tl.program_id(1) * 3 + 2)
    slot = tl.load(slots + i_row)
    if slot > 0:
        num_ranks = tl.load(rank + (slot - 1) * PARTS + i_part)
        o_s = tl.arange(0, BS)
        b_sum = tl.zeros([BO], tl.float32)
        for r in range(0, num_ranks, BR):
            o_r = r + tl.arange(0, BR)
            m_r = o_r < num_ranks
            p_z = z + ((o_s * num_rows + i_row) * PARTS + i_part)[:, None] * MOST + o_r[None, :]
            b_z = tl.load(p_z, mask=(o_s < SPLITS)[:, None] & m_r[None, :], other=0.0)
            o_j = ((slot - 1) * MOST + o_r).to(tl.int64)
            p_b = b + o_j[:, None] * OUTPUTS + o_o[None, :]
            b_b = tl.load(p_b, mask=m_r[:, None] & m_o[None, :], other=0.0)
            b_sum += tl.sum(tl.sum(b_z, axis=0)[:, None] * b_b.to(tl.float32), axis=0)
        p_y = y + i_row.to(tl.int64) * y_stride + o_o
        b_y = tl.load(p_y, mask=m_o, other=0.0).to(tl.float32)
        if TURNED:
            p_turn = turn + (slot - 1) * 2 * OUTPUTS + o_o
            b_factor = tl.load(p_turn, mask=m_o & (num_ranks > 0), other=1.0)
            b_shift = tl.load(p_turn + OUTPUTS, mask=m_o & (num_ranks > 0), other=0.0)
            b_y = b_y * b_factor + b_shift
        b_y += b_sum
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_o)


@triton.jit
def shrink_kernel(
    x,
    slots,
    a,
    scale,
    rank,
    z,
    num_rows,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    i_part = tl.program_id(1) % PARTS
    o_r = tl.program_id(1) // PARTS * BR + tl.arange(0, BR)
    m_t = o_t < num_rows
    b_slot = tl.load(slots + o_t, mask=m_t, other=0)
    first = tl.min(tl.where(b_slot > 0, b_slot, 2147483647), axis=0)
    last = tl.max(b_slot, axis=0)
    b_z = tl.zeros([BT, BR], tl.float32)
    for slot in range(first, last + 1):
        m_slot = b_slot == slot
        i_weight = ((slot - 1) * PARTS + i_part).to(tl.int64)
        num_ranks = tl.load(rank + i_weight)
        members = tl.sum(m_slot.to(tl.int32), axis=0)
        if members > 0 and tl.program_id(1) // PARTS * BR < num_ranks:
            b_sum = tl.zeros([BT, BR], tl.float32)
            m_r = o_r < num_ranks
            for i in range(0, INPUTS, BI):
                o_i = i + tl.arange(0, BI)
                m_i = o_i < INPUTS
                p_x = x + o_t.to(tl.int64)[:, None] * x_stride + o_i[None, :]
                b_x = tl.load(p_x, mask=m_slot[:, None] & m_i[None, :], other=0.0)
                p_a = a + (i_weight * MOST + o_r)[:, None] * INPUTS + o_i[None, :]
                b_a = tl.load(p_a, mask=m_r[:, None] & m_i[None, :], other=0.0)
                b_sum = tl.dot(b_x, tl.trans(b_a), b_sum, input_precision="ieee")
            b_z += b_sum * tl.load(scale + i_weight)
    p_z = z + (o_t.to(tl.int64)[:, None] * PARTS + i_part) * MOST + o_r[None, :]
    tl.store(p_z, b_z, mask=m_t[:, None] & (o_r < MOST)[None, :])


@triton.jit
def expand_kernel(
    z,
    slots,
    b,
    rank,
    turn,
    tiles,
    y,
    num_rows,
    y_stride,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    TURNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    i_part = tl.load(tiles + tl.program_id(1) * 3)
    o_o = tl.load(tiles + tl.program_id(1) * 3 + 1) + tl.arange(0, BO)
    m_o = o_o < tl.load(tiles + tl.program_id(1) * 3 + 2)
    m_t = o_t < num_rows
    b_slot = tl.load(slots + o_t, mask=m_t, other=0)
    first = tl.min(tl.where(b_slot > 0, b_slot, 2147483647), axis=0)
    last = tl.max(b_slot, axis=0)
    b_sum = tl.zeros([BT, BO], tl.float32)
    p_y = y + o_t.to(tl.int64)[:, None] * y_stride + o_o[None, :]
    m_y = (b_slot > 0)[:, None] & m_o[None, :]
    if TURNED:
        b_sum += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    for slot in range(first, last + 1):
        m_slot = b_slot == slot
        num_ranks = tl.load(rank + (slot - 1) * PARTS + i_part)
        members = tl.sum(m_slot.to(tl.int32), axis=0)
        if members > 0:
            if TURNED:
                p_turn = turn + (slot - 1) * 2 * OUTPUTS + o_o
                b_factor = tl.load(p_turn, mask=m_o & (num_ranks > 0), other=1.0)
                b_shift = tl.load(p_turn + OUTPUTS, mask=m_o & (num_ranks > 0), other=0.0)
                b_turned = b_sum * b_factor[None, :] + b_shift[None, :]
                b_sum = tl.where(m_slot[:, None], b_turned, b_sum)
            for r in range(0, num_ranks, BR):
                o_r = r + tl.arange(0, BR)
                m_r = o_r < num_ranks
                p_z = z + (o_t.to(tl.int64)[:, None] * PARTS + i_part) * MOST + o_r[None, :]
                b_z = tl.load(p_z, mask=m_slot[:, None] & m_r[None, :], other=0.0)
                o_j = ((slot - 1) * MOST + o_r).to(tl.int64)
                p_b = b + o_j[:, None] * OUTPUTS + o_o[None, :]
                b_b = tl.load(p_b, mask=m_r[:, None] & m_o[None, :], other=0.0)
                b_sum = tl.dot(b_z.to(b_b.dtype), b_b, b_sum, input_precision="ieee")
    b_y = b_sum
    if not TURNED:
        b_y += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


def bind(problem: LoraLinearProblem, weights: LoraWeights) -> LoraLinear:
    """The kernels for one linear layer."""
    check_weights(problem, weights)
    few, many = _by_row(problem, weights), _by_tile(problem, weights)
    most = FEW_ROWS if problem.slots <= TILE_SLOTS else sys.maxsize

    def lora_linear(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TO.stride(1) == 1, (x_TI.stride(), y_TO.stride())
        if x_TI.shape[0]:
            (few if x_TI.shape[0] <= most else many)(x_TI, y_TO, slot_T)

    return lora_linear


def _by_row(problem: LoraLinearProblem, weights: LoraWeights) -> LoraLinear:
    device, parts, most = weights.a_SKI.device, len(problem.parts), problem.rank
    tiles, turn = _tiles(problem.parts, ROW_OUTPUTS).to(device), weights.turn_S2O
    inputs = min(SPLIT, power_of_two(problem.inputs, least=16))
    splits = triton.cdiv(problem.inputs, inputs)

    def by_row(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        rows = x_TI.shape[0]
        z_STPR = torch.empty((splits, rows, parts, most), dtype=torch.float32, device=device)
        common = {"PARTS": parts, "MOST": most, "BR": 16, "num_warps": 4, **launch(device)}
        shrink_row_kernel[(rows, parts * triton.cdiv(most, 16), splits)](
            x_TI, slot_T, weights.a_SKI, weights.scale_SP, weights.rank_SP, z_STPR, rows,
            x_TI.stride(0), INPUTS=problem.inputs, BI=inputs, **common,
        )  # fmt: skip
        expand_row_kernel[(rows, len(tiles))](
            z_STPR, slot_T, weights.b_SRO, weights.rank_SP, turn, tiles, y_TO, rows, y_TO.stride(0),
            OUTPUTS=problem.outputs, SPLITS=splits, BS=power_of_two(splits), BO=ROW_OUTPUTS,
            TURNED=problem.turned, **common,
        )  # fmt: skip

    return by_row


def _by_tile(problem: LoraLinearProblem, weights: LoraWeights) -> LoraLinear:
    device, parts, most = weights.a_SKI.device, len(problem.parts), problem.rank
    tiles, turn = _tiles(problem.parts, OUTPUTS).to(device), weights.turn_S2O
    ranks = min(64, power_of_two(most, least=16))

    def by_tile(x_TI: torch.Tensor, y_TO: torch.Tensor, slot_T: torch.Tensor) -> None:
        rows = x_TI.shape[0]
        z_TPR = torch.empty((rows, parts, most), dtype=torch.float32, device=device)
        common = {"PARTS": parts, "MOST": most, "BT": ROWS, "num_warps": 4, **launch(device)}
        shrink_kernel[(triton.cdiv(rows, ROWS), parts * triton.cdiv(most, ranks))](
            x_TI, slot_T, weights.a_SKI, weights.scale_SP, weights.rank_SP, z_TPR, rows,
            x_TI.stride(0), INPUTS=problem.inputs, BR=ranks, BI=INPUTS, **common,
        )  # fmt: skip
        expand_kernel[(triton.cdiv(rows, ROWS), len(tiles))](
            z_TPR, slot_T, weights.b_SRO, weights.rank_SP, turn, tiles, y_TO, rows, y_TO.stride(0),
            OUTPUTS=problem.outputs, BR=min(32, ranks), BO=OUTPUTS,
            TURNED=problem.turned, **common,
        )  # fmt: skip

    return by_tile


def _tiles(parts: tuple[int, ...], width: int) -> torch.Tensor:
    """int32 [tiles, 3]: the part of each tile of outputs, where it begins, where its part ends."""
    rows, begin = [], 0
    for part, size in enumerate(parts):
        rows += [(part, first, begin + size) for first in range(begin, begin + size, width)]
        begin += size
    return torch.tensor(rows, dtype=torch.int32)


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=False,
)
