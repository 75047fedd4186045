"""Weights that a checkpoint holds block-quantized, taken as they are: blocks are packed into
panels, never dequantized.

A fused weight (query, key, value; gate, up) may have parts of different layouts: it becomes
segments of one layout each. A split over ranks takes whole blocks: rows freely, inputs in multiples
of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.linear_blocks.layout import (
    STORED_LAYOUTS,
    BlockLayout,
    BlockWeight,
    Segment,
    empty_segment,
)
from headrace.back.kernels.linear_blocks.native import MAX_SEGMENTS, pack_rows
from headrace.back.kernels.native.library import loaded
from headrace.back.parallel.bundle import CutGroup, Dim, Member
from headrace.back.parallel.param import Copy, Param, StoredRows, copies, cut_error
from headrace.base.errors import CheckpointError

Stored = Mapping[str, str]
"""Checkpoint tensor -> the type it is stored in, of those that are block-quantized."""


def kept_blocks(param: Param, stored: Stored) -> bool:
    """Whether all of a matrix is block-quantized, in layouts that there are kernels for."""
    layouts = [STORED_LAYOUTS.get(stored.get(piece.name, "")) for piece in param.pieces]
    scaled = any(piece.scale != 1.0 for piece in param.pieces)
    if len(param.shape) != 2 or len(layouts) > MAX_SEGMENTS or scaled:
        return False
    return all(layout is not None and param.shape[1] % layout.block == 0 for layout in layouts)


@dataclass(frozen=True)
class _Run:
    """Rows of one copy: they become outputs first, first + 1, ... of segment `segment`."""

    segment: int
    first: int


class StoredWeight:
    """A weight [outputs, inputs] filled with blocks. `take` gives it to its layer.

    The parameter has no plain tensor; the loader hands blocks to `param.on_blocks` instead.
    """

    def __init__(self, param: Param, stored: Stored, *, meta: bool) -> None:
        assert param.tensor is not None and param.tensor.dim() == 2, param
        self._param = param
        self._outputs, self._inputs = param.tensor.shape
        ordered = sorted(copies(param), key=lambda copy: copy.target[0].start)
        self._runs, sizes = _runs(param, stored, ordered, self._inputs)
        assert sum(size for _, size in sizes) == self._outputs, (param.name, sizes)
        param.packed_bytes = sum(c.packed_bytes(size, self._inputs) for c, size in sizes)
        param.tensor = None
        param.on_blocks = self._write
        self._segments: tuple[Segment, ...] | None = None
        if not meta:
            self._segments = tuple(
                empty_segment(layout, size, self._inputs) for layout, size in sizes
            )

    def take(self) -> BlockWeight:
        """The packed weight."""
        assert self._segments is not None, f"{self._param.name} was taken before"
        weight, self._segments = BlockWeight(self._inputs, self._segments), None
        return weight

    def _write(self, copy: Copy, rows: StoredRows) -> int | None:
        """Packs the rows and columns of one copy; the first source row with a scale of NaN or Inf,
        or None."""
        assert self._segments is not None, self._param.name
        run = self._runs[copy.name, copy.target[0].start, copy.target[1].start]
        segment = self._segments[run.segment]
        columns = blocks_of(segment.layout).cut(copy.source, copy.shape)[1]
        data = rows.data[:, columns.start :]
        wanted = np.ascontiguousarray(rows.order[copy.source[0]])
        return pack_rows(loaded(), segment, run.first, data, wanted)


def _runs(
    param: Param, stored: Stored, ordered: list[Copy], inputs: int
) -> tuple[dict[tuple[str, int, int], _Run], list[tuple[BlockLayout, int]]]:
    """Where each copy goes, and (layout, outputs) of the segments; neighbours of one layout share a
    segment."""
    runs: dict[tuple[str, int, int], _Run] = {}
    sizes: list[tuple[BlockLayout, int]] = []
    for copy in ordered:
        layout = STORED_LAYOUTS[stored[copy.name]]
        _check_columns(param, copy, layout, inputs)
        rows = copy.target[0].stop - copy.target[0].start
        if not sizes or sizes[-1][0] is not layout:
            sizes.append((layout, 0))
        runs[copy.name, copy.target[0].start, copy.target[1].start] = _Run(
            len(sizes) - 1, sizes[-1][1]
        )
        sizes[-1] = (layout, sizes[-1][1] + rows)
    return runs, sizes


def _check_columns(param: Param, copy: Copy, layout: BlockLayout, inputs: int) -> None:
    if (copy.target[1].start, copy.target[1].stop) != (0, inputs):
        raise CheckpointError(f"{copy.name}: its columns come from several tensors; not supported")
    try:
        blocks_of(layout).cut(copy.source, copy.shape)
    except CutGroup as error:
        raise cut_error(param, copy.name, error, f"{layout.name} block") from error


def blocks_of(layout: BlockLayout) -> Member:
    """A layout's blocks as a checkpoint stores them, uint8 [O, bytes of a row]."""
    return Member(
        name="weight",
        dtype=torch.uint8,
        dims=(Dim(0), Dim(1, per=layout.block, width=layout.size)),
    )
