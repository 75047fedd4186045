"""How int8 weights lie in memory: panels of 64 outputs, one stream of bytes each.

A code, -127 .. 127, is stored plus 128, four inputs of one output in four neighbouring bytes, 64 outputs side
by side: what one vector dot product instruction reads. O outputs, I inputs. Per panel: 64 float32 scales (one
per output), then for every 4 inputs [64 outputs][4] bytes. Inputs and outputs are padded with code 0 and scale
0. Weights with a scale per group of inputs: linear_blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.platforms import huge_pages

PANEL, OFFSET = 64, 128


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs]; `panels` is uint8 [ceil(O / 64), bytes of a panel]."""

    outputs: int
    inputs: int
    panels: torch.Tensor


def empty(outputs: int, inputs: int) -> PackedWeight:
    """A weight to be filled with `write_panels`."""
    shape = (-(-outputs // PANEL), _panel_bytes(inputs))
    return PackedWeight(outputs, inputs, huge_pages.kept(shape, torch.uint8))


def packed_bytes(outputs: int, inputs: int) -> int:
    """What such a weight takes in memory, scales and padding included."""
    return -(-outputs // PANEL) * _panel_bytes(inputs)


def _panel_bytes(inputs: int) -> int:
    return PANEL * 4 + -(-inputs // 4) * PANEL * 4


def write_panels(
    weight: PackedWeight, first: int, codes_OI: torch.Tensor, scales_O1: torch.Tensor
) -> None:
    """Fills the panels from number `first` on with int8 codes [O, I] and scales [O, 1]."""
    rows, inputs = codes_OI.shape
    count = -(-rows // PANEL)
    codes = (F.pad(codes_OI, (0, -inputs % 4, 0, count * PANEL - rows)) + OFFSET).to(torch.uint8)
    scales = F.pad(scales_O1, (0, 0, 0, count * PANEL - rows)).view(count, PANEL)
    panels = weight.panels[first : first + count]
    panels[:, : PANEL * 4].view(torch.float32).copy_(scales)
    steps = codes.view(torch.int32).view(count, PANEL, -1).transpose(1, 2)
    panels[:, PANEL * 4 :].view(torch.int32).view(count, -1, PANEL).copy_(steps)


def read_rows(weight: PackedWeight, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8 [N, I]) and scales (float32 [N, 1]) of some outputs."""
    panel_N, column_N = rows_N // PANEL, rows_N % PANEL
    panels = weight.panels
    scales = panels[:, : PANEL * 4].view(torch.float32)[panel_N, column_N, None]
    steps = panels[:, PANEL * 4 :].view(len(panels), -1, PANEL, 4)
    codes = steps[panel_N, :, column_N].flatten(1)
    return (codes[:, : weight.inputs].to(torch.int16) - OFFSET).to(torch.int8), scales


def dequantize_rows(weight: PackedWeight, rows_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, I] of some outputs: code * scale."""
    codes, scales = read_rows(weight, rows_N)
    return codes.float() * scales
