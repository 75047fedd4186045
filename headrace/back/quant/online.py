"""Quantizes plain weights while a checkpoint loads.

A weight is packed as soon as the loader has written its last piece, and the plain tensor is let go:
memory never holds more than the packed model and the few parameters that are being filled.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.linear_quant.layout import (
    PANEL,
    PackedWeight,
    empty,
    packed_bytes,
    write_panels,
)
from headrace.back.kernels.linear_quant.quantize import quantize
from headrace.back.parallel.param import Param
from headrace.back.quant.scheme import Scheme

CHUNK_ELEMENTS = 1 << 18
"""Values quantized at a time: the float32 copies stay in the second-level cache."""


class OnlineWeight:
    """A weight [outputs, inputs] that is packed when it is full. `take` gives it to its layer."""

    def __init__(self, param: Param, scheme: Scheme) -> None:
        self._param = param
        self._scheme = scheme
        self._packed: PackedWeight | None = None
        assert param.tensor is not None and param.tensor.dim() == 2, param
        param.on_filled = self._pack
        param.packed_bytes = packed_bytes(scheme.bits, *param.tensor.shape)

    def take(self) -> PackedWeight:
        """The packed weight; a loader that does not announce full parameters has it packed now."""
        if self._packed is None:
            self._pack()
        packed, self._packed = self._packed, None
        assert packed is not None, f"{self._param.name} was taken before"
        return packed

    def _pack(self) -> None:
        self._packed = pack(self._param.take(), self._scheme)


def pack(weight_OI: torch.Tensor, scheme: Scheme) -> PackedWeight:
    """The quantized weight, made some panels at a time."""
    outputs, inputs = weight_OI.shape
    packed = empty(scheme.bits, outputs, inputs)
    if quantize(weight_OI, packed):
        return packed
    panels = max(1, CHUNK_ELEMENTS // (PANEL * inputs))
    for first in range(0, -(-outputs // PANEL), panels):
        rows = weight_OI[first * PANEL : (first + panels) * PANEL]
        write_panels(packed, first, *scheme.quantize(rows))
    return packed
