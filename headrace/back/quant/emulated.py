"""Weights that are rounded to the numbers of a scheme no kernel of the device reads, and stay
floats: what the scheme costs in quality can be seen, and no memory is saved. A decision says so.

X experts, E width, O outputs, I inputs (of experts their inner size).
"""

from __future__ import annotations

import torch

from headrace.back.parallel.param import Param
from headrace.back.quant.experts import Floats
from headrace.back.quant.scheme import Scheme
from headrace.base.config.resolved import Decision

ROUNDED_ELEMENTS = 1 << 22
"""Values at a time: their float32 copies are small."""


class EmulatedWeight:
    """A weight [outputs, inputs] that is rounded when it is full. `take` gives it to its layer."""

    def __init__(self, param: Param, scheme: Scheme) -> None:
        self._param, self._scheme, self._rounded = param, scheme, False
        param.on_filled = self._round

    def take(self) -> torch.Tensor:
        """The weight; a loader that does not announce full parameters has it rounded now."""
        if not self._rounded:
            self._round()
        self._rounded = False
        return self._param.take()

    def _round(self) -> None:
        round_to(self._param.present(), self._scheme)
        self._rounded = True


class EmulatedExperts:
    """Experts that are rounded when their layer takes them: [X, 2I, E] and [X, E, I]."""

    def __init__(self, floats: Floats, scheme: Scheme) -> None:
        self._floats, self._scheme = floats, scheme

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups; downs."""
        up_XIE, down_XEI = self._floats()
        inner = down_XEI.shape[2]
        for weight_XOI in (up_XIE[:, :inner], up_XIE[:, inner:], down_XEI):
            for weight_OI in weight_XOI:
                round_to(weight_OI, self._scheme)
        return up_XIE, down_XEI


def round_to(weight_OI: torch.Tensor, scheme: Scheme) -> None:
    """In place: each value becomes the one that the scheme keeps of it."""
    if weight_OI.device.type == "meta":
        return
    common = scheme.common(weight_OI)
    for rows in row_slices(*weight_OI.shape, scheme, ROUNDED_ELEMENTS):
        part = weight_OI[rows]
        part.copy_(scheme.dequantize(scheme.quantize(part, common)))


def row_slices(outputs: int, inputs: int, scheme: Scheme, elements: int) -> list[slice]:
    """About so many values at a time, whole blocks of outputs."""
    unit = max(1, scheme.outputs)
    step = unit * max(1, elements // (unit * max(1, inputs)))
    return [slice(first, first + step) for first in range(0, outputs, step)]


def note_of(scheme: Scheme, dtype: torch.dtype) -> Decision:
    """What is said at start."""
    kept = str(dtype).removeprefix("torch.")
    return Decision(
        "--quantization",
        scheme.name,
        f"rounded, kept as {kept}",
        "no kernel of this device reads it: quality is that of the scheme, memory and speed are not",
    )
