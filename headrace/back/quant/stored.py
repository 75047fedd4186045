"""Weights that a checkpoint holds block-quantized, taken as they are: blocks are packed into panels, never widened.

A fused weight (query, key, value; gate, up) may have parts of different codings: it becomes segments of one coding
each. A split over ranks takes whole blocks: rows freely, inputs in multiples of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.back.kernels.linear_blocks.layout import (
    STORED_CODINGS,
    BlockWeight,
    Coding,
    Segment,
    empty_segment,
)
from headrace.back.kernels.linear_blocks.native import MAX_SEGMENTS, pack_rows
from headrace.back.kernels.native.wrap import loaded
from headrace.back.parallel.param import Copy, Param, StoredRows, copies
from headrace.base.errors import CheckpointError, ConfigError

Stored = Mapping[str, str]
"""Checkpoint tensor -> the type it is stored in, of those that are block-quantized."""


def kept_blocks(param: Param, stored: Stored) -> bool:
    """Whether all of a matrix is block-quantized, in codings that there are kernels for."""
    codings = [STORED_CODINGS.get(stored.get(piece.name, "")) for piece in param.pieces]
    if len(param.shape) != 2 or len(codings) > MAX_SEGMENTS:
        return False
    return all(coding is not None and param.shape[1] % coding.block == 0 for coding in codings)


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
            made = (empty_segment(coding, size, self._inputs) for coding, size in sizes)
            self._segments = tuple(made)

    def take(self) -> BlockWeight:
        """The packed weight."""
        assert self._segments is not None, f"{self._param.name} was taken before"
        weight, self._segments = BlockWeight(self._inputs, self._segments), None
        return weight

    def _write(self, copy: Copy, rows: StoredRows) -> int | None:
        """Packs the rows and columns of one copy; the first source row with a scale of NaN or Inf, or None."""
        assert self._segments is not None, self._param.name
        run = self._runs[copy.name, copy.target[0].start, copy.target[1].start]
        segment = self._segments[run.segment]
        size = segment.coding.size
        begin = copy.source[1].start // segment.coding.block * size
        data = rows.data[:, begin:]
        wanted = np.ascontiguousarray(rows.order[copy.source[0]])
        return pack_rows(loaded(), segment, run.first, data, wanted)


def _runs(
    param: Param, stored: Stored, ordered: list[Copy], inputs: int
) -> tuple[dict[tuple[str, int, int], _Run], list[tuple[Coding, int]]]:
    """Where each copy goes, and (coding, outputs) of the segments; neighbours of one coding share a segment."""
    runs: dict[tuple[str, int, int], _Run] = {}
    sizes: list[tuple[Coding, int]] = []
    for copy in ordered:
        coding = STORED_CODINGS[stored[copy.name]]
        _check_columns(param, copy, coding, inputs)
        rows = copy.target[0].stop - copy.target[0].start
        if not sizes or sizes[-1][0] is not coding:
            sizes.append((coding, 0))
        runs[copy.name, copy.target[0].start, copy.target[1].start] = _Run(
            len(sizes) - 1, sizes[-1][1]
        )
        sizes[-1] = (coding, sizes[-1][1] + rows)
    return runs, sizes


def _check_columns(param: Param, copy: Copy, coding: Coding, inputs: int) -> None:
    start, stop = copy.source[1].start, copy.source[1].stop
    if (copy.target[1].start, copy.target[1].stop) != (0, inputs):
        raise CheckpointError(f"{copy.name}: its columns come from several tensors; not supported")
    if start % coding.block or stop % coding.block:
        raise ConfigError(
            f"--tensor-parallel gives a rank inputs {start} to {stop} of {copy.name}: that cuts a {coding.name} "
            f"block of {coding.block}; its {copy.shape[1]} inputs are {copy.shape[1] // coding.block} blocks",
            field="tensor_parallel",
        )
