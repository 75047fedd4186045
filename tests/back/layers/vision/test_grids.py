"""Learned places at the size of a grid (KRN-12): taps and weights are PyTorch's interpolation, in the order of merged
windows, over odd grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import bilinear, coordinates
from headrace.back.layers.vision.grids import bicubic, bilinear_cells, nearest, window_order

GRIDS = [(1, 1, 1, 1), (1, 3, 5, 1), (1, 2, 6, 2), (3, 4, 10, 2), (2, 9, 3, 3), (1, 40, 4, 4)]
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "corners": (bilinear, {"mode": "bilinear", "align_corners": True}),
    "cells": (bilinear_cells, {"mode": "bilinear", "align_corners": False}),
    "bicubic": (bicubic, {"mode": "bicubic", "align_corners": False}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("t", "h", "w", "merge"), GRIDS)
def test_places_are_interpolated_as_by_pytorch(
    way: str, t: int, h: int, w: int, merge: int
) -> None:
    side = 7
    table = torch.randn(side**2, 3, generator=torch.Generator().manual_seed(1))
    taps, options = WAYS[way]
    places, weights = taps((t, h, w), merge, side)
    assert places.min() >= 0 and places.max() < side**2
    ours = (table[torch.from_numpy(places)] * torch.from_numpy(weights)[..., None]).sum(1)
    square = table.view(1, side, side, 3).permute(0, 3, 1, 2)
    resized = F.interpolate(square, size=(h, w), **options)[0].permute(1, 2, 0)
    row, column = coordinates((t, h, w), merge)
    torch.testing.assert_close(ours, resized[row, column], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("t", "h", "w", "merge"), GRIDS)
def test_rows_lie_in_windows_each_patch_once(t: int, h: int, w: int, merge: int) -> None:
    row, column = coordinates((t, h, w), merge)
    steps = np.stack((row, column), axis=1).reshape(t, -1, merge**2, 2)
    assert (steps == steps[:1]).all()
    windows = steps[0] // merge
    assert (windows == windows[:, :1]).all()
    assert len({tuple(one) for one in steps[0].reshape(-1, 2).tolist()}) == h * w


@pytest.mark.parametrize(("t", "h", "w", "merge"), GRIDS)
def test_larger_windows_hold_every_merged_window_once(t: int, h: int, w: int, merge: int) -> None:
    order, lengths = window_order([(t, h, w), (1, merge, merge)], merge, 2)
    count = t * h * w // merge**2 + 1
    assert sorted(order.tolist()) == list(range(count))
    assert sum(lengths) == count * merge**2 and max(lengths) <= 4 * merge**2


def test_a_share_s_place_is_that_of_whole_numbers() -> None:
    for count in (1, 2, 3, 7, 8, 13, 32):
        at = coordinates((1, count, count), 1)
        places = nearest(at, [(1, count, count)], [count**2], 8)
        row, column = at
        wanted = row * 8 // count * 8 + column * 8 // count
        assert (np.abs(places - wanted) == 0).all(), count
