"""Both in Triton, one launch each: a program per tile of a frame's patches, which finds rows and
columns from their number in it. Nothing of the size of N is made on the host or sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.patch_places.op import (
    Grid,
    PatchPositions,
    PatchPositionsProblem,
    PatchTurns,
    PatchTurnsProblem,
    bilinear,
    corner_steps,
    frequencies,
    rows_then_columns,
)
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported
from headrace.back.kernels.upload import held, to_device

PATCHES = 32
COLUMNS = 128
KEPT_LISTS = 8


@triton.jit
def _place(tiles, i_tile, MERGE: tl.constexpr, M: tl.constexpr):
    """The patches of a tile, which of them there are, and the row and the column of each."""
    first, begin = tl.load(tiles + i_tile * 4), tl.load(tiles + i_tile * 4 + 1)
    end, across = tl.load(tiles + i_tile * 4 + 2), tl.load(tiles + i_tile * 4 + 3)
    o_n = first + tl.arange(0, M)
    at = o_n - begin
    window, inside = at // (MERGE * MERGE), at % (MERGE * MERGE)
    row = window // across * MERGE + inside // MERGE
    column = window % across * MERGE + inside % MERGE
    return o_n.to(tl.int64), o_n < end, row, column


@triton.jit
def patch_positions_kernel(
    x, table, tiles, steps, x_stride, SIDE: tl.constexpr, WIDTH: tl.constexpr,
    MERGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """tiles [Q, 4] int32: first patch, first and end of its frame, windows across; steps [Q, 2]
    float32: `corner_steps`."""
    enter(DEPENDENT)
    i_tile = tl.program_id(0)
    o_n, m_n, row, column = _place(tiles, i_tile, MERGE, M)
    down = row.to(tl.float32) * tl.load(steps + i_tile * 2)
    right = column.to(tl.float32) * tl.load(steps + i_tile * 2 + 1)
    top, left = tl.floor(down), tl.floor(right)
    down, right = down - top, right - left
    o_top, o_left = top.to(tl.int32), left.to(tl.int32)
    o_low, o_far = tl.minimum(o_top + 1, SIDE - 1), tl.minimum(o_left + 1, SIDE - 1)
    o_e = tl.program_id(1) * N + tl.arange(0, N)
    m = m_n[:, None] & (o_e < WIDTH)[None, :]
    p = table + o_e[None, :]
    b = tl.load(p + ((o_top * SIDE + o_left) * WIDTH)[:, None], mask=m, other=0.0).to(tl.float32)
    b_y = b * ((1 - down) * (1 - right))[:, None]
    b = tl.load(p + ((o_top * SIDE + o_far) * WIDTH)[:, None], mask=m, other=0.0).to(tl.float32)
    b_y += b * ((1 - down) * right)[:, None]
    b = tl.load(p + ((o_low * SIDE + o_left) * WIDTH)[:, None], mask=m, other=0.0).to(tl.float32)
    b_y += b * (down * (1 - right))[:, None]
    b = tl.load(p + ((o_low * SIDE + o_far) * WIDTH)[:, None], mask=m, other=0.0).to(tl.float32)
    b_y += b * (down * right)[:, None]
    p_x = x + (o_n * x_stride)[:, None] + o_e[None, :]
    b_x = tl.load(p_x, mask=m, other=0.0)
    b_y = b_y.to(b_x.dtype).to(tl.float32) + b_x.to(tl.float32)
    tl.store(p_x, b_y.to(b_x.dtype), mask=m)


@triton.jit
def patch_turns_kernel(
    table, frequency, tiles, COUNT: tl.constexpr, F: tl.constexpr, MERGE: tl.constexpr,
    M: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """table [N, 4 * COUNT]: cosines by row and by column, then sines; frequency [COUNT] float32."""
    enter(DEPENDENT)
    o_n, m_n, row, column = _place(tiles, tl.program_id(0), MERGE, M)
    o_f = tl.arange(0, F)
    b_f = tl.load(frequency + o_f, mask=o_f < COUNT, other=0.0)
    m = m_n[:, None] & (o_f < COUNT)[None, :]
    p = table + (o_n * (4 * COUNT))[:, None] + o_f[None, :]
    b_row = row.to(tl.float32)[:, None] * b_f[None, :]
    b_column = column.to(tl.float32)[:, None] * b_f[None, :]
    tl.store(p, tl.cos(b_row), mask=m)
    tl.store(p + COUNT, tl.cos(b_column), mask=m)
    tl.store(p + 2 * COUNT, tl.sin(b_row), mask=m)
    tl.store(p + 3 * COUNT, tl.sin(b_column), mask=m)


def _bind_positions(problem: PatchPositionsProblem) -> PatchPositions:
    def add(x_NE: torch.Tensor, table_PE: torch.Tensor, grids: Sequence[Grid]) -> None:
        assert x_NE.stride(1) == 1 and table_PE.is_contiguous()
        tiles, steps = _tiles(tuple(grids), problem.merge, problem.side, x_NE.device)
        columns = triton.cdiv(problem.width, COLUMNS)
        patch_positions_kernel[(tiles.shape[0], columns)](
            x_NE, table_PE, tiles, steps, x_NE.stride(0), SIDE=problem.side, WIDTH=problem.width,
            MERGE=problem.merge, M=PATCHES, N=COLUMNS, num_warps=4, **launch(x_NE.device),
        )  # fmt: skip

    return add


def _bind_turns(problem: PatchTurnsProblem) -> PatchTurns:
    count = problem.head_dim // 4

    def turns(grids: Sequence[Grid], device: torch.device) -> torch.Tensor:
        tiles, _ = _tiles(tuple(grids), problem.merge, 1, device)
        frequency_F = held(_frequencies(problem.head_dim, problem.theta, device))
        patches = sum(t * h * w for t, h, w in grids)
        table_NR = torch.empty(patches, problem.head_dim, dtype=torch.float32, device=device)
        patch_turns_kernel[(tiles.shape[0],)](
            table_NR, frequency_F, tiles, COUNT=count, F=triton.next_power_of_2(count),
            MERGE=problem.merge, M=PATCHES, num_warps=4, **launch(device),
        )  # fmt: skip
        return table_NR

    return turns


def _tiles(
    grids: tuple[Grid, ...], merge: int, side: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles of these grids, and the steps of each (kernels' docstrings)."""
    tiles, steps = _listed(grids, merge, side, device)
    return held(tiles), held(steps)


@lru_cache(maxsize=KEPT_LISTS)
def _listed(
    grids: tuple[Grid, ...], merge: int, side: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    lists, steps, begin = [], [], 0
    for t, h, w in grids:
        for _ in range(t):
            firsts = range(begin, begin + h * w, PATCHES)
            lists += [(first, begin, begin + h * w, w // merge) for first in firsts]
            steps += [corner_steps(h, w, side)] * len(firsts)
            begin += h * w
    tiles = to_device(np.array(lists, np.int32).reshape(-1, 4), device)
    return tiles, to_device(np.array(steps, np.float32).reshape(-1, 2), device)


@lru_cache(maxsize=KEPT_LISTS)
def _frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    return frequencies(head_dim // 2, theta, device)


def _supports_positions(problem: PatchPositionsProblem) -> str | None:
    if problem.taps is not bilinear:
        return "resamples between four neighbours, corners on corners, alone"
    return unsupported(problem.device, problem.dtype)


def _supports_turns(problem: PatchTurnsProblem) -> str | None:
    if problem.turns is not rows_then_columns:
        return "turns by rows, then by columns alone"
    if problem.head_dim % 4:
        return f"takes heads of multiples of 4, not {problem.head_dim}"
    return unsupported(problem.device, torch.float32)


POSITIONS = Kernel(
    name="triton", supports=_supports_positions, bind=_bind_positions, invariant=True
)
TURNS = Kernel(name="triton", supports=_supports_turns, bind=_bind_turns, invariant=True)
