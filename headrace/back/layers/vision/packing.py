"""From an encoder's rows, one for each window, to those that stand for an input: parts of a picture
that was cut into tiles and put together again, with learned rows between (Liu et al. 2024,
LLaVA-NeXT; Li et al. 2024, LLaVA-OneVision). What is shown, `MediaCut` and `Packing` say
(base/wire/media.py).

M rows, W their width, T tiles or steps, H, L windows down and across.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import to_device
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.grids import kept_windows, starts_of
from headrace.base.wire.media import MediaCut, MediaForm, Packing


def packed(
    y_MW: torch.Tensor, form: MediaForm, grids: Sequence[Grid], cuts: Sequence[MediaCut | None]
) -> torch.Tensor:
    """The rows of inputs, end to end; `y_MW`: those of all their windows, behind them the learned
    ones, of a form that packs."""
    packing = form.packing
    if packing is None:
        return _kept(y_MW, form, grids, cuts)
    windows = [t * h * w // form.merge**2 for t, h, w in grids]
    parts = y_MW.split([*windows, packing.num_learned])
    learned = list(parts[-1].split(1))
    newline_1W = learned.pop(0) if packing.newline else None
    rows: list[torch.Tensor] = []
    for part_MW, grid, cut in zip(parts, grids, cuts, strict=False):
        if cut is None:
            rows.append(part_MW)
            continue
        t, h, w = grid[0], grid[1] // form.merge, grid[2] // form.merge
        tiles_THLW = part_MW.view(t, h, w, -1)
        if packing.halved:
            tiles_THLW = _resized(tiles_THLW, (-(-h // 2), -(-w // 2)))
        if cut.columns:
            tiles_THLW = _shown(tiles_THLW, packing, cut)
        if cut.columns and newline_1W is not None:
            ends = newline_1W.expand(1, tiles_THLW.shape[1], 1, -1)
            tiles_THLW = torch.cat((tiles_THLW, ends), dim=2)
        rows += [tiles_THLW.reshape(-1, y_MW.shape[1]), *(learned if cut.tail else ())]
    return torch.cat(rows)


def _kept(
    y_MW: torch.Tensor, form: MediaForm, grids: Sequence[Grid], cuts: Sequence[MediaCut | None]
) -> torch.Tensor:
    """Without the rows of windows that are pruned."""
    if not any(cut is not None and cut.kept for cut in cuts):
        return y_MW
    windows = [t * h * w // form.merge**2 for t, h, w in grids]
    places = [
        first + kept_windows(cut, count)
        for first, cut, count in zip(starts_of(windows), cuts, windows, strict=False)
    ]
    return y_MW.index_select(0, to_device(np.concatenate(places), y_MW.device))


def _shown(tiles_THLW: torch.Tensor, packing: Packing, cut: MediaCut) -> torch.Tensor:
    """[1, H, L, W]: what is shown of the tiles, put together."""
    tiles, h, w, width = tiles_THLW.shape
    down = tiles // cut.columns
    whole_HLW = tiles_THLW.view(down, cut.columns, h, w, width).permute(0, 2, 1, 3, 4)
    whole_HLW = whole_HLW.reshape(down * h, cut.columns * w, width)
    top = (whole_HLW.shape[0] - cut.height) // 2 if packing.middle else 0
    left = (whole_HLW.shape[1] - cut.width) // 2 if packing.middle else 0
    shown_HLW = whole_HLW[top : top + cut.height, left : left + cut.width]
    return _resized(shown_HLW[None], packing.size(cut))


def _resized(tiles_THLW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if tuple(tiles_THLW.shape[1:3]) == size:
        return tiles_THLW
    planes_TWHL = tiles_THLW.permute(0, 3, 1, 2)
    return F.interpolate(planes_TWHL, size=size, mode="bilinear").permute(0, 2, 3, 1)
