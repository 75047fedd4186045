"""How quantized weights lie in memory: panels of 64 outputs, one stream of bytes each.

A code is stored unsigned, with an offset, four inputs of one output in four neighbouring bytes, 64
outputs side by side: what one vector dot product instruction reads. O outputs, I inputs.

int8  per panel: 64 float32 scales (one per output), then for every 4 inputs [64 outputs][4] bytes
      of code + 128, codes in -127 .. 127.
int4  per panel, for every group of 32 inputs: 64 bfloat16 scales, then [4][64 outputs][4] bytes;
      the low half of byte b of row r is code + 8 of input 8 r + b, the high half that of input
      8 r + 4 + b; codes in -8 .. 7.

Inputs and outputs are padded with code 0 and scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.platforms import huge_pages

PANEL, GROUP = 64, 32
OFFSETS = {8: 128, 4: 8}
MULTIPLES = {8: 4, 4: GROUP}
_INT4_BYTES = PANEL * 2 + GROUP // 8 * PANEL * 4


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs] of `bits` 8 or 4; `panels` is uint8 [ceil(O / 64), bytes of a
    panel]."""

    bits: int
    outputs: int
    inputs: int
    panels: torch.Tensor


def empty(bits: int, outputs: int, inputs: int) -> PackedWeight:
    """A weight to be filled with `write_panels`."""
    shape = (-(-outputs // PANEL), _panel_bytes(bits, inputs))
    return PackedWeight(bits, outputs, inputs, huge_pages.kept(shape, torch.uint8))


def packed_bytes(bits: int, outputs: int, inputs: int) -> int:
    """What such a weight takes in memory, scales and padding included."""
    return -(-outputs // PANEL) * _panel_bytes(bits, inputs)


def _panel_bytes(bits: int, inputs: int) -> int:
    steps = -(-inputs // MULTIPLES[bits])
    return PANEL * 4 + steps * PANEL * 4 if bits == 8 else steps * _INT4_BYTES


def write_panels(
    weight: PackedWeight, first: int, codes_OI: torch.Tensor, scales_OG: torch.Tensor
) -> None:
    """Fills the panels from number `first` on with int8 codes [O, I] and scales: [O, 1] for int8,
    [O, I / 32] for int4 (whose values bfloat16 holds exactly)."""
    rows, inputs = codes_OI.shape
    count = -(-rows // PANEL)
    tail = (0, -inputs % MULTIPLES[weight.bits], 0, count * PANEL - rows)
    codes = (F.pad(codes_OI, tail) + OFFSETS[weight.bits]).to(torch.uint8)
    scales = F.pad(scales_OG, (0, 0, 0, count * PANEL - rows)).view(count, PANEL, -1)
    panels = weight.panels[first : first + count]
    if weight.bits == 8:
        panels[:, : PANEL * 4].view(torch.float32).copy_(scales[..., 0])
        steps = codes.view(torch.int32).view(count, PANEL, -1).transpose(1, 2)
        panels[:, PANEL * 4 :].view(torch.int32).view(count, -1, PANEL).copy_(steps)
        return
    groups = panels.view(count, -1, _INT4_BYTES)
    groups[..., : PANEL * 2].view(torch.bfloat16).copy_(scales.transpose(1, 2))
    halves = codes.view(torch.int32).view(count, PANEL, -1, GROUP // 8, 2)
    both = (halves[..., 0] | halves[..., 1] << 4).permute(0, 2, 3, 1)
    groups[..., PANEL * 2 :].view(torch.int32).view(both.shape).copy_(both)


def read_rows(weight: PackedWeight, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8 [N, I]) and scales (float32 [N, 1] or [N, I / 32]) of some outputs."""
    panel_N, column_N = rows_N // PANEL, rows_N % PANEL
    panels = weight.panels
    if weight.bits == 8:
        scales = panels[:, : PANEL * 4].view(torch.float32)[panel_N, column_N, None]
        steps = panels[:, PANEL * 4 :].view(len(panels), -1, PANEL, 4)
        codes = steps[panel_N, :, column_N].flatten(1)
    else:
        groups = panels.view(len(panels), -1, _INT4_BYTES)
        scales = groups[..., : PANEL * 2].view(torch.bfloat16)[panel_N, :, column_N].float()
        halves = groups[..., PANEL * 2 :].view(len(panels), -1, GROUP // 8, PANEL, 4)
        both = halves[panel_N, :, :, column_N]
        codes = torch.stack((both & 15, both >> 4), dim=-2).flatten(1)
    return (codes[:, : weight.inputs].to(torch.int16) - OFFSETS[weight.bits]).to(torch.int8), scales


def dequantize_rows(weight: PackedWeight, rows_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, I] of some outputs: code * scale."""
    codes, scales = read_rows(weight, rows_N)
    wide = scales.repeat_interleave(GROUP, 1)[:, : weight.inputs] if weight.bits == 4 else scales
    return codes.float() * wide
