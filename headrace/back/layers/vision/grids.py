"""What follows from the grid of an input, on the host: where its patches are, the windows that its
layers attend within, and how a learned table of positions is resampled.

Rows are in the order of base/wire/media.py. N patches, M windows of merge x merge patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.back.kernels.patch_places.op import Grid, between, coordinates
from headrace.base.wire.media import MediaCut


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each t of each input."""
    return [h * w for t, h, w in grids for _ in range(t)]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The first patch of each span, and their number."""
    return [0, *np.cumsum(np.asarray(lengths, np.int64)).tolist()]


def kept_windows(cut: MediaCut | None, windows: int) -> np.ndarray:
    """int64 [M]: the windows of an input of so many that are not pruned."""
    if cut is None or not cut.kept:
        return np.arange(windows)
    return np.flatnonzero(np.unpackbits(np.frombuffer(cut.kept, np.uint8), count=windows))


def window_order(grids: Sequence[Grid], merge: int, side: int) -> tuple[np.ndarray, list[int]]:
    """The windows in the order of larger windows of side x side of them (those at the edges may be
    smaller), int64 [M], and the patches of each larger window (Bai et al. 2025, Qwen2.5-VL,
    section 2.1.1)."""
    orders: list[np.ndarray] = []
    lengths: list[int] = []
    first = 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        index = first + np.arange(t * rows * columns).reshape(t, rows, columns)
        for step in index:
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    tile = step[top : top + side, left : left + side]
                    orders.append(tile.ravel())
                    lengths.append(tile.size * merge**2)
        first += index.size
    return np.concatenate(orders), lengths


def bilinear_cells(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """How a table of side x side positions is resampled for each patch, cells on cells: places in
    the table int64 [N, 4] and their weights float32 [N, 4]."""
    _, h, w = grid
    at = coordinates(grid, merge).astype(np.float32) + np.float32(0.5)
    scale = np.array([[side / h], [side / w]], np.float32)
    return between(np.maximum(at * scale - np.float32(0.5), 0), side)


def bicubic(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by four rows and four columns, cells on cells (Keys 1981, with a = -0.75): places
    int64 [N, 16] and weights float32 [N, 16]."""
    _, h, w = grid
    at = coordinates(grid, merge).astype(np.float32) + 0.5
    exact = at * np.array([[side / h], [side / w]], np.float32) - 0.5
    low = np.floor(exact)
    taps = low[..., None] + np.arange(-1, 3)
    far = np.abs(exact[..., None] - taps).astype(np.float32)
    a = np.float32(-0.75)
    near = ((a + 2) * far - (a + 3)) * far * far + 1
    wide = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    (down, across), (rows, columns) = np.where(far <= 1, near, wide), np.clip(taps, 0, side - 1)
    places = rows[:, :, None] * side + columns[:, None, :]
    weights = down[:, :, None] * across[:, None, :]
    return places.reshape(-1, 16).astype(np.int64), weights.reshape(-1, 16)


def nearest(
    at_2N: np.ndarray, grids: Sequence[Grid], lengths: Sequence[int], side: int
) -> np.ndarray:
    """int64 [N]: for each patch the place in a table of side x side that its share of the image
    falls into; `lengths`: patches of each t."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    size_2N = np.repeat([(h, w) for t, h, w in grids for _ in range(t)], lengths, axis=0).T
    share_2N = torch.from_numpy(at_2N) / torch.from_numpy(size_2N)
    row_N, column_N = torch.bucketize(share_2N, bounds, right=True).numpy()
    place_N: np.ndarray = row_N * side + column_N
    return place_N
