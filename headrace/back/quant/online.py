"""Quantizes plain weights while a checkpoint loads.

A weight is packed as soon as the loader has written its last piece, and the plain tensor is let go:
memory never holds more than the packed model and the few parameters that are being filled.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.linear_blocks import layout as blocks
from headrace.back.kernels.linear_blocks.layout import (
    MXFP4,
    NVFP4,
    ONLINE_LAYOUTS,
    VECTOR_LAYOUTS,
    BlockLayout,
    BlockWeight,
    Segment,
)
from headrace.back.kernels.linear_blocks.quantize import quantize_blocks
from headrace.back.kernels.linear_quant.layout import (
    PANEL,
    PackedWeight,
    empty,
    packed_bytes,
    write_panels,
)
from headrace.back.kernels.linear_quant.quantize import quantize
from headrace.back.parallel.bundle import FP8, FP8_GROUPS, INT8, WeightForm
from headrace.back.parallel.param import Param
from headrace.back.quant.scheme import Scheme
from headrace.base import heap

CHUNK_ELEMENTS = 1 << 16
"""Values quantized at a time: the float32 copies stay in the second-level cache. To e2m1 numbers
what stands beside them takes 30 bytes a value, for each thread that loads."""


class OnlineWeight:
    """A weight [outputs, inputs] that is packed when it is full. `take` gives it to its layer."""

    def __init__(self, param: Param, scheme: Scheme) -> None:
        self._param = param
        self._scheme = scheme
        self._packed: PackedWeight | BlockWeight | None = None
        assert param.tensor is not None and param.tensor.dim() == 2, param
        param.on_filled = self._pack
        param.packed_bytes = size_of(scheme, *param.tensor.shape)

    def take(self) -> PackedWeight | BlockWeight:
        """The packed weight; a loader that does not announce full parameters has it packed now."""
        if self._packed is None:
            self._pack()
        packed, self._packed = self._packed, None
        assert packed is not None, f"{self._param.name} was taken before"
        return packed

    def _pack(self) -> None:
        """Threads that load have heaps of their own, in which the plain weights that they let go
        would stay: up to 14 MiB each."""
        self._packed = pack(self._param.take(), self._scheme)
        heap.trim()


def layout_of(scheme: Scheme) -> BlockLayout | None:
    """How a scheme lies in blocks; None: it has a `row_form`."""
    if row_form(scheme) is not None:
        return None
    if scheme.name in VECTOR_LAYOUTS:
        return VECTOR_LAYOUTS[scheme.name]
    if scheme.floating:
        return NVFP4 if scheme.outer else MXFP4
    kind = f"int{scheme.bits}{'-asym' if scheme.asymmetric else ''}"
    return ONLINE_LAYOUTS[f"{kind}-g{scheme.group}"]


def row_form(scheme: Scheme) -> WeightForm | None:
    """The form of panels of a byte a weight; None: a scheme lies in blocks (`layout_of`)."""
    if scheme.floating and scheme.bits == 8:
        return FP8 if scheme.group is None else FP8_GROUPS[scheme.group]
    return INT8 if scheme.group is None else None


def size_of(scheme: Scheme, outputs: int, inputs: int) -> int:
    """Bytes of a weight of a scheme in panels, padding included."""
    form, layout = row_form(scheme), layout_of(scheme)
    if layout is not None:
        return layout.packed_bytes(outputs, inputs)
    assert form is not None, scheme
    return packed_bytes(outputs, inputs, form)


def pack(weight_OI: torch.Tensor, scheme: Scheme) -> PackedWeight | BlockWeight:
    """The quantized weight, made some panels at a time."""
    packed = empty_weight(*weight_OI.shape, scheme)
    pack_into(weight_OI, scheme, packed)
    return packed


def empty_weight(outputs: int, inputs: int, scheme: Scheme) -> PackedWeight | BlockWeight:
    """A weight of a scheme, to be filled."""
    form, layout = row_form(scheme), layout_of(scheme)
    if layout is None:
        assert form is not None, scheme
        return empty(outputs, inputs, form)
    return BlockWeight(inputs, (blocks.empty_segment(layout, outputs, inputs),))


def pack_into(weight_OI: torch.Tensor, scheme: Scheme, packed: PackedWeight | BlockWeight) -> None:
    """Quantizes a weight into panels of its scheme."""
    if isinstance(packed, PackedWeight):
        _pack_rows(weight_OI, scheme, packed)
    else:
        _pack_blocks(weight_OI, scheme, packed.segments[0])


def _pack_rows(weight_OI: torch.Tensor, scheme: Scheme, packed: PackedWeight) -> None:
    if scheme.outputs == 1 and quantize(weight_OI, packed):
        return
    common = scheme.common(weight_OI)
    for first, rows in chunks(*weight_OI.shape, scheme.outputs):
        quantized, scales, _ = scheme.quantize(weight_OI[rows], common)
        write_panels(packed, first, quantized, scales)


def _pack_blocks(weight_OI: torch.Tensor, scheme: Scheme, segment: Segment) -> None:
    if scheme.floating or not quantize_blocks(weight_OI, segment):
        common = scheme.common(weight_OI)
        for first, rows in chunks(*weight_OI.shape):
            blocks.write_quantized(segment, first, *scheme.quantize(weight_OI[rows], common))


def chunks(outputs: int, inputs: int, unit: int = 1) -> list[tuple[int, slice]]:
    """(number of the first panel, its rows and the next ones), a few panels and whole units of rows
    at a time."""
    least = -(-max(1, unit) // PANEL)
    panels = max(1, CHUNK_ELEMENTS // (PANEL * inputs * least)) * least
    return [
        (first, slice(first * PANEL, (first + panels) * PANEL))
        for first in range(0, -(-outputs // PANEL), panels)
    ]
