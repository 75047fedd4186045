"""What the place of a patch gives to a vision tower: a learned position, resampled from a square
table, and the angles by which heads turn (Bai et al. 2025, Qwen3-VL; Wang et al. 2024, Qwen2-VL).

Two ops. `patch_positions`: `bind(problem)` returns `f(x_NE, table_PE, grids) -> None`, which adds
to each of N patches its position, in place. `patch_turns`: `bind(problem)` returns `f(grids,
device) -> table_NR` float32, the cosines and the sines of each patch's angles, R = head_dim.
`grids`: t, h, w of each input in patches, on the host; patches lie in windows of merge x merge, row
by row, as base/wire/media.py has them.

N patches, E width, P = side * side positions, T taps, D head_dim, F = D / 4 frequencies of an axis,
H = D / 2 angles of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.upload import planned

Grid = tuple[int, int, int]
Taps = Callable[[Grid, int, int], tuple[np.ndarray, np.ndarray]]
"""A grid, merge and side -> places in the table int64 [N, T] and their weights float32 [N, T]."""
Turns = Callable[[torch.Tensor, int, float], torch.Tensor]
"""place_2N (rows, columns), D and theta -> angles_NH float32."""
PatchPositions = Callable[[torch.Tensor, torch.Tensor, Sequence[Grid]], None]
PatchTurns = Callable[[Sequence[Grid], torch.device], torch.Tensor]


def coordinates(grid: Grid, merge: int) -> np.ndarray:
    """int64 [2, N]: the row and the column of each patch."""
    t, h, w = grid
    at = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    return np.tile(at.transpose(0, 1, 3, 2, 4).reshape(2, -1), t)


def bilinear(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """How a table of side x side positions is resampled for each patch, corners on corners."""
    _, h, w = grid
    at = coordinates(grid, merge).astype(np.float32)
    return between(at * np.array(corner_steps(h, w, side), np.float32)[:, None], side)


def corner_steps(h: int, w: int, side: int) -> tuple[float, float]:
    """How far apart in the table neighbours of a grid are, down and across."""
    return (side - 1) / max(h - 1, 1), (side - 1) / max(w - 1, 1)


def between(exact: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four neighbours of rows and columns [2, N] and their weights."""
    low = np.floor(exact).astype(np.int64)
    high = np.minimum(low + 1, side - 1)
    part = (exact - low).astype(np.float32)
    (top, left), (bottom, right), (down, across) = low, high, part
    places = np.stack(
        (top * side + left, top * side + right, bottom * side + left, bottom * side + right), axis=1
    )
    weights = np.stack(
        (
            (1 - down) * (1 - across),
            (1 - down) * across,
            down * (1 - across),
            down * across,
        ),
        axis=1,
    )
    return places, weights


def rows_then_columns(place_2N: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The row's angles, then the column's (Wang et al. 2024, Qwen2-VL)."""
    angles_2NF = place_2N[..., None] * frequencies(head_dim // 2, theta, place_2N.device)
    return angles_2NF.permute(1, 0, 2).flatten(1)


def frequencies(dims: int, theta: float, device: torch.device) -> torch.Tensor:
    """float32 [dims / 2]: radians of a step."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
    return 1.0 / theta**exponents


@dataclass(frozen=True, kw_only=True)
class PatchPositionsProblem:
    """`side` of the table of positions of width E; `taps`: how it is resampled."""

    device: str
    dtype: torch.dtype
    width: int
    merge: int
    side: int
    taps: Taps = bilinear


@dataclass(frozen=True, kw_only=True)
class PatchTurnsProblem:
    """Heads of `head_dim` D that turn by `turns`, with base `theta`."""

    device: str
    head_dim: int
    merge: int
    theta: float
    turns: Turns = rows_then_columns


def bind_positions(problem: PatchPositionsProblem) -> PatchPositions:
    """The reference: places and weights from the host, gathered."""

    def add(x_NE: torch.Tensor, table_PE: torch.Tensor, grids: Sequence[Grid]) -> None:
        taps = [problem.taps(grid, problem.merge, problem.side) for grid in grids]
        place_NT = planned(np.concatenate([place for place, _ in taps]), x_NE.device)
        weight_NT = planned(np.concatenate([weight for _, weight in taps]), x_NE.device)
        x_NE += (table_PE[place_NT].float() * weight_NT[..., None]).sum(1).to(x_NE.dtype)

    return add


def bind_turns(problem: PatchTurnsProblem) -> PatchTurns:
    """The reference: rows and columns from the host."""

    def table(grids: Sequence[Grid], device: torch.device) -> torch.Tensor:
        at_2N = np.concatenate([coordinates(grid, problem.merge) for grid in grids], axis=1)
        angles_NH = problem.turns(planned(at_2N, device), problem.head_dim, problem.theta)
        return torch.cat((angles_NH.cos(), angles_NH.sin()), dim=1)

    return table


_GRIDS = ((1, 1, 1), (1, 3, 5), (2, 4, 3), (1, 9, 9))


def _sized(merge: int) -> list[Grid]:
    return [(t, h * merge, w * merge) for t, h, w in _GRIDS]


def _positions_sample(problem: PatchPositionsProblem) -> Sample:
    grids = _sized(problem.merge)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    x_NE = random_tensor(sum(t * h * w for t, h, w in grids), problem.width, **new)
    table_PE = random_tensor(problem.side**2, problem.width, **new)
    return Sample(problem=problem, weights=(), arguments=(x_NE, table_PE, grids))


def _turns_sample(problem: PatchTurnsProblem) -> Sample:
    arguments = (_sized(problem.merge), torch.device(problem.device))
    return Sample(problem=problem, weights=(), arguments=arguments)


OP: Op[PatchPositionsProblem] = Op(
    name="patch_positions",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_positions, invariant=True
    ),
    kernels=("headrace.back.kernels.patch_places.triton_patch_places:POSITIONS",),
    sample=_positions_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
    outputs=lambda sample: [sample.arguments[0]],
)
TURNS_OP: Op[PatchTurnsProblem] = Op(
    name="patch_turns",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_turns, invariant=True),
    kernels=("headrace.back.kernels.patch_places.triton_patch_places:TURNS",),
    sample=_turns_sample,
    tolerance=lambda problem: 1e-5,
)
