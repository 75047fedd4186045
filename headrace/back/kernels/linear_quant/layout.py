"""How weights of a byte with a scale per output, or e4m3 numbers with one per output and group of
inputs, lie in memory: panels of 64 outputs, one stream of bytes each.

O outputs, I inputs, G groups of inputs (of most forms one). Per panel, for each group: 64 float32
scales (one per output), then for every 4 inputs 256 bytes:

    int8    [64 outputs][4 inputs]; a quantized value, -127 .. 127, is stored plus 128: what one
            vector dot product
            instruction reads
    fp8     [16][2 pairs of inputs][4 outputs][2 inputs] e4m3 numbers: those that become
            neighbouring words stand
            in one half of 16 bytes (native/fp8.h)

Inputs and outputs are padded with value 0 and scale 0. Integers with a scale per group of inputs:
linear_blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear_quant.rows import FixedScale
from headrace.back.parallel.bundle import FP8, FP8_GROUPS, INT8, WeightForm
from headrace.back.platforms import huge_pages

PANEL, OFFSET = 64, 128
FORMS = (INT8, FP8, *FP8_GROUPS.values())


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs]; `panels` is uint8 [ceil(O / 64), bytes of a panel]. `form`: one
    of FORMS. `fixed`: the scale of all tokens that int8 values are multiplied by, None: each has
    its own; `begin_P` (int32 [P outputs of whole panels]): what sums of products begin with then,
    so that its zero point is taken off; None: 0."""

    outputs: int
    inputs: int
    panels: torch.Tensor
    form: WeightForm = INT8
    fixed: FixedScale | None = None
    begin_P: torch.Tensor | None = None

    @property
    def reads_quantized_rows(self) -> bool:
        """Whether GEMMs with it multiply by QuantizedRows (rows.py)."""
        return self.form == INT8


def empty(outputs: int, inputs: int, form: WeightForm = INT8) -> PackedWeight:
    """A weight to be filled with `write_panels`."""
    assert form in FORMS, form
    shape = (-(-outputs // PANEL), _panel_bytes(inputs, form))
    return PackedWeight(outputs, inputs, huge_pages.kept(shape, torch.uint8), form)


def with_fixed(weight: PackedWeight, values_OI: torch.Tensor, fixed: FixedScale) -> PackedWeight:
    """The int8 weight, packed of such values, by which tokens of one scale are multiplied."""
    assert weight.form == INT8, weight.form
    if fixed.zero == 0:
        return replace(weight, fixed=fixed)
    sums_O = values_OI.sum(1, dtype=torch.int32)
    begin_P = F.pad(-fixed.zero * sums_O, (0, len(weight.panels) * PANEL - len(sums_O)))
    return replace(weight, fixed=fixed, begin_P=begin_P)


def packed_bytes(outputs: int, inputs: int, form: WeightForm = INT8) -> int:
    """What such a weight takes in memory, scales and padding included."""
    return -(-outputs // PANEL) * _panel_bytes(inputs, form)


def _panel_bytes(inputs: int, form: WeightForm) -> int:
    return (-(-inputs // _group(inputs, form)) + -(-inputs // 4)) * PANEL * 4


def _group(inputs: int, form: WeightForm) -> int:
    return min(inputs, form.group[1]) or inputs


def _groups(panels: torch.Tensor, inputs: int, form: WeightForm) -> Iterator[torch.Tensor]:
    """Of each group the bytes of the panels."""
    size, begin = _group(inputs, form), 0
    for first in range(0, inputs, size):
        end = begin + (1 + -(-min(size, inputs - first) // 4)) * PANEL * 4
        yield panels[:, begin:end]
        begin = end


def write_panels(
    weight: PackedWeight, first: int, quantized_OI: torch.Tensor, scales_OG: torch.Tensor
) -> None:
    """Fills the panels from number `first` on with quantized values [O, I] (int8, or the bits of
    e4m3) and scales [O, G]."""
    panels = weight.panels[first : first + -(-len(quantized_OI) // PANEL)]
    size = _group(weight.inputs, weight.form)
    for i, group in enumerate(_groups(panels, weight.inputs, weight.form)):
        values_OI = quantized_OI[:, i * size : (i + 1) * size]
        _write_group(weight.form, group, values_OI, scales_OG[:, i : i + 1])


def _write_group(
    form: WeightForm, panels: torch.Tensor, quantized_OI: torch.Tensor, scales_O1: torch.Tensor
) -> None:
    rows, inputs = quantized_OI.shape
    count = len(panels)
    padded = F.pad(quantized_OI, (0, -inputs % 4, 0, count * PANEL - rows))
    scales = F.pad(scales_O1, (0, 0, 0, count * PANEL - rows)).reshape(count, PANEL)
    panels[:, : PANEL * 4].view(torch.float32).copy_(scales)
    steps = panels[:, PANEL * 4 :]
    if form == INT8:
        quantized = (padded + OFFSET).to(torch.uint8).view(torch.int32).view(count, PANEL, -1)
        steps.view(torch.int32).unflatten(1, (-1, PANEL)).copy_(quantized.transpose(1, 2))
    else:
        pairs = padded.view(torch.int16).view(count, PANEL // 4, 4, -1, 2).permute(0, 3, 1, 4, 2)
        steps.view(torch.int16).unflatten(1, (-1, PANEL // 4, 2, 4)).copy_(pairs)


def read_rows(weight: PackedWeight, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values (int8 [N, I], or the bits of e4m3) and scales (float32 [N, G]) of some
    outputs."""
    groups = _groups(weight.panels, weight.inputs, weight.form)
    parts = [_read_group(weight.form, group, rows_N) for group in groups]
    quantized = torch.cat([values for values, _ in parts], 1)[:, : weight.inputs]
    return quantized.contiguous(), torch.cat([scales for _, scales in parts], 1)


def _read_group(
    form: WeightForm, panels: torch.Tensor, rows_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    panel_N, column_N = rows_N // PANEL, rows_N % PANEL
    scales = panels[:, : PANEL * 4].view(torch.float32)[panel_N, column_N, None]
    steps = panels[:, PANEL * 4 :]
    if form == INT8:
        quantized = steps.unflatten(1, (-1, PANEL, 4))[panel_N, :, column_N].flatten(1)
        return (quantized.to(torch.int16) - OFFSET).to(torch.int8), scales
    pairs = steps.view(torch.int8).unflatten(1, (-1, PANEL // 4, 2, 4, 2))
    return pairs[panel_N, :, column_N // 4, :, column_N % 4].flatten(1), scales


def values_of(weight: PackedWeight, quantized: torch.Tensor) -> torch.Tensor:
    """What quantized values say without their scale, in float32."""
    return (quantized if weight.form == INT8 else quantized.view(torch.float8_e4m3fn)).float()


def dequantize_rows(weight: PackedWeight, rows_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, I] of some outputs: value * scale."""
    quantized, scales_NG = read_rows(weight, rows_N)
    return values_of(weight, quantized) * spread(weight, scales_NG)


def spread(weight: PackedWeight, scales_NG: torch.Tensor) -> torch.Tensor:
    """Scales [N, G] as one for each input, or, where all share one, as they are."""
    if scales_NG.shape[1] == 1:
        return scales_NG
    return scales_NG.repeat_interleave(weight.form.group[1], 1)[:, : weight.inputs]
