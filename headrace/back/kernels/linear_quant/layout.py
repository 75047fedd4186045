"""How weights of a byte with a scale per output lie in memory: panels of 64 outputs, one stream of
bytes each.

O outputs, I inputs. Per panel: 64 float32 scales (one per output), then for every 4 inputs 256
bytes:

    int8    [64 outputs][4 inputs]; a quantized value, -127 .. 127, is stored plus 128: what one
            vector dot product
            instruction reads
    fp8     [16][2 pairs of inputs][4 outputs][2 inputs] e4m3 numbers: those that become
            neighbouring words stand
            in one half of 16 bytes (native/fp8.h)

Inputs and outputs are padded with value 0 and scale 0. Weights with a scale per group of inputs:
linear_blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.parallel.bundle import FP8, INT8, WeightForm
from headrace.back.platforms import huge_pages

PANEL, OFFSET = 64, 128
FORMS = (INT8, FP8)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs]; `panels` is uint8 [ceil(O / 64), bytes of a panel]. `form`: one
    of FORMS."""

    outputs: int
    inputs: int
    panels: torch.Tensor
    form: WeightForm = INT8

    @property
    def reads_quantized_rows(self) -> bool:
        """Whether GEMMs with it multiply by QuantizedRows (rows.py)."""
        return self.form == INT8


def empty(outputs: int, inputs: int, form: WeightForm = INT8) -> PackedWeight:
    """A weight to be filled with `write_panels`."""
    assert form in FORMS, form
    shape = (-(-outputs // PANEL), _panel_bytes(inputs))
    return PackedWeight(outputs, inputs, huge_pages.kept(shape, torch.uint8), form)


def packed_bytes(outputs: int, inputs: int) -> int:
    """What such a weight takes in memory, scales and padding included."""
    return -(-outputs // PANEL) * _panel_bytes(inputs)


def _panel_bytes(inputs: int) -> int:
    return PANEL * 4 + -(-inputs // 4) * PANEL * 4


def write_panels(
    weight: PackedWeight, first: int, quantized_OI: torch.Tensor, scales_O1: torch.Tensor
) -> None:
    """Fills the panels from number `first` on with quantized values [O, I] (int8, or the bits of
    e4m3) and scales [O, 1]."""
    rows, inputs = quantized_OI.shape
    count = -(-rows // PANEL)
    padded = F.pad(quantized_OI, (0, -inputs % 4, 0, count * PANEL - rows))
    scales = F.pad(scales_O1, (0, 0, 0, count * PANEL - rows)).view(count, PANEL)
    panels = weight.panels[first : first + count]
    panels[:, : PANEL * 4].view(torch.float32).copy_(scales)
    steps = panels[:, PANEL * 4 :]
    if weight.form == INT8:
        quantized = (padded + OFFSET).to(torch.uint8).view(torch.int32).view(count, PANEL, -1)
        steps.view(torch.int32).view(count, -1, PANEL).copy_(quantized.transpose(1, 2))
    else:
        pairs = padded.view(torch.int16).view(count, PANEL // 4, 4, -1, 2).permute(0, 3, 1, 4, 2)
        steps.view(torch.int16).view(count, -1, PANEL // 4, 2, 4).copy_(pairs)


def read_rows(weight: PackedWeight, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values (int8 [N, I], or the bits of e4m3) and scales (float32 [N, 1]) of some
    outputs."""
    panel_N, column_N = rows_N // PANEL, rows_N % PANEL
    panels = weight.panels
    scales = panels[:, : PANEL * 4].view(torch.float32)[panel_N, column_N, None]
    steps = panels[:, PANEL * 4 :]
    if weight.form == INT8:
        quantized = steps.view(len(panels), -1, PANEL, 4)[panel_N, :, column_N].flatten(1)
        return (quantized[:, : weight.inputs].to(torch.int16) - OFFSET).to(torch.int8), scales
    pairs = steps.view(torch.int8).view(len(panels), -1, PANEL // 4, 2, 4, 2)
    quantized = pairs[panel_N, :, column_N // 4, :, column_N % 4].flatten(1)
    return quantized[:, : weight.inputs].contiguous(), scales


def values_of(weight: PackedWeight, quantized: torch.Tensor) -> torch.Tensor:
    """What quantized values say without their scale, in float32."""
    return (quantized if weight.form == INT8 else quantized.view(torch.float8_e4m3fn)).float()


def dequantize_rows(weight: PackedWeight, rows_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, I] of some outputs: value * scale."""
    quantized, scales = read_rows(weight, rows_N)
    return values_of(weight, quantized) * scales
