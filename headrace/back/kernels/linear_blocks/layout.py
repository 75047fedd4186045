"""How block-quantized weights lie in memory: panels of 64 outputs, one stream of bytes each.

A weight is value * scale - minimum. Two kinds of formats are laid out so. Those of checkpoints have
blocks of 32 or 256 inputs with a float16 scale (and minimum); where a block has 256, each 16 or 32
inputs have a small whole number that scale (and minimum) are multiplied by. All bits of a
checkpoint's blocks are kept as they are, only moved: 6-bit multipliers become bytes, so panels of
256-input blocks take 2 to 4 % more (Q2_K 19 %), the others nothing. Those made while a plain
checkpoint loads have blocks of 32, 64 or 128 inputs with a bfloat16 scale (and minimum); the last
block may be padded.

Per panel, for every block of inputs:
  [64] scale; with minima [64] minimum; `scaled_parts`: [64] scale of each part instead
  for every 32 inputs of the block:
    with two levels [32 / part][64] int8 multipliers of the scale, then as many of the minimum
    planes of 64 words (32 bits, one per output): byte b of step s is input 4 s + b, s = 0 .. 7
      8 bits: plane s holds step s
      4 bits: plane r holds steps 2 r (low half) and 2 r + 1
      2 bits: plane r holds steps 4 r .. 4 r + 3, lowest bits first
      a fifth (or third) bit: one plane more, bit s of each byte
      a fifth and sixth: two planes, as for 2 bits
Quantized values are stored unsigned, plus `offset`; layouts with a table store the index of a
level. Outputs are padded with zeros, inputs with value 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.parallel.bundle import Number, WeightForm, Zeros
from headrace.back.platforms import huge_pages

PANEL, GROUP = 64, 32
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the e2m1 numbers: the scales of MXFP4 are half as large, exactly, but for those of numbers
below 2^-124, which count as 0."""


def _signed(*sizes: int) -> tuple[int, ...]:
    return (*sizes, *(-size for size in sizes))


IQ2_LEVELS = _signed(0, 1, 7, 8, 9, 25, 43, 0)
IQ3_XXS_LEVELS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_LEVELS = _signed(1, 3, 5, 7, 9, 11, 13, 15)
"""What the vectors of GGUF's IQ types are made of: IQ1 and IQ2 (eighths), IQ3."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """A way to value weights. `number` is that of the native kernels; a block of `block` inputs
    takes `size` bytes in a checkpoint, 0: no checkpoint holds it; `part` inputs share a scale.
    `dtype` is that of the scales; `levels` what the indices of a table stand for. `scaled_parts`:
    each part of a block has a scale of its own, and no multiplier."""

    name: str
    number: int
    block: int
    size: int
    part: int
    bits: int
    offset: int = 0
    minimum: bool = False
    levels: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float16
    scaled_parts: bool = False

    @property
    def form(self) -> WeightForm:
        """What its numbers mean."""
        number = Number.TABLE if self.levels else Number.UINT if self.minimum else Number.INT
        scales = torch.int8 if self.two_level else self.dtype
        return WeightForm(
            bits=self.bits,
            number=number,
            group=(1, self.part),
            scale_dtype=scales,
            zeros=Zeros.MINIMUM if self.minimum else Zeros.NONE,
            outer=(1, self.block) if self.two_level else None,
        )

    @property
    def two_level(self) -> bool:
        """Whether parts of a block have multipliers of their own."""
        return self.part < self.block and not self.scaled_parts

    @property
    def x_group(self) -> int:
        """Inputs that share a scale of the activations."""
        return max(self.part, GROUP)

    @property
    def header_bytes(self) -> int:
        """Scales (and minima) of a block, in a panel."""
        parts = self.block // self.part if self.scaled_parts else 1
        return PANEL * self.dtype.itemsize * (2 if self.minimum else parts)

    @property
    def scale_bytes(self) -> int:
        """Multipliers of 32 inputs, in a panel."""
        return GROUP // self.part * PANEL * (2 if self.minimum else 1) if self.two_level else 0

    @property
    def block_bytes(self) -> int:
        """A block of inputs in a panel."""
        return self.header_bytes + self.block // GROUP * (self.scale_bytes + self.bits * PANEL * 4)

    def panel_bytes(self, inputs: int) -> int:
        """A panel of that many inputs."""
        assert inputs % self.block == 0 or not self.two_level, (self.name, inputs)
        return -(-inputs // self.block) * self.block_bytes

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        """What such a weight takes in memory, padding included."""
        return -(-outputs // PANEL) * self.panel_bytes(inputs)


def _layout(
    number: int,
    name: str,
    block: int,
    size: int,
    part: int,
    bits: int,
    offset: int = 0,
    *,
    minimum: bool = False,
    levels: tuple[int, ...] | None = None,
) -> BlockLayout:
    return BlockLayout(
        name=name,
        number=number,
        block=block,
        size=size,
        part=part,
        bits=bits,
        offset=offset,
        minimum=minimum,
        levels=levels,
    )


MXFP4 = BlockLayout(name="MXFP4", number=21, block=32, size=17, part=32, bits=4, levels=E2M1_LEVELS,
                    dtype=torch.float8_e8m0fnu)  # fmt: skip

STORED_LAYOUTS: dict[str, BlockLayout] = {
    layout.name: layout
    for layout in (
        _layout(0, "Q8_0", 32, 34, 32, 8, 128),
        _layout(1, "Q4_0", 32, 18, 32, 4, 8),
        _layout(2, "Q4_1", 32, 20, 32, 4, minimum=True),
        _layout(3, "Q5_0", 32, 22, 32, 5, 16),
        _layout(4, "Q5_1", 32, 24, 32, 5, minimum=True),
        _layout(5, "Q2_K", 256, 84, 16, 2, minimum=True),
        _layout(6, "Q3_K", 256, 110, 16, 3, 4),
        _layout(7, "Q4_K", 256, 144, 32, 4, minimum=True),
        _layout(8, "Q5_K", 256, 176, 32, 5, minimum=True),
        _layout(9, "Q6_K", 256, 210, 16, 6, 32),
        _layout(10, "IQ4_NL", 32, 18, 32, 4, levels=LEVELS),
        _layout(11, "IQ4_XS", 256, 136, 32, 4, levels=LEVELS),
        MXFP4,
    )
}
"""Of checkpoints, by their types' names."""


def _online(
    first: int, name: str, bits: int, offset: int = 0, *, minimum: bool = False
) -> tuple[BlockLayout, ...]:
    return tuple(
        BlockLayout(name=f"{name}-g{block}", number=first + i, block=block, size=0, part=block, bits=bits,
               offset=offset, minimum=minimum, dtype=torch.bfloat16)
        for i, block in enumerate((32, 64, 128))
    )  # fmt: skip


ONLINE_LAYOUTS: dict[str, BlockLayout] = {
    layout.name: layout
    for layout in (
        *_online(12, "int4", 4, 8),
        *_online(15, "int4-asym", 4, minimum=True),
        *_online(18, "int8", 8, 128),
        *_online(23, "int8-asym", 8, 128, minimum=True),
    )
}
"""Made from plain weights while they load; "int8-asym" of checkpoints alone."""
NVFP4 = BlockLayout(name="nvfp4", number=22, block=32, size=0, part=16, bits=4, levels=E2M1_LEVELS,
                    dtype=torch.bfloat16, scaled_parts=True)  # fmt: skip
"""Scales of 16 inputs, which are e4m3 numbers times one for all, are rounded to bfloat16."""
ONLINE_LAYOUTS[NVFP4.name] = NVFP4
VECTOR_LAYOUTS: dict[str, BlockLayout] = {
    name: BlockLayout(name=name, number=number, block=32, size=0, part=part, bits=4, levels=levels,
                      dtype=torch.bfloat16, scaled_parts=part < 32)
    for number, name, part, levels in (
        (26, "iq2", 16, IQ2_LEVELS),
        (27, "iq3-xxs", 32, IQ3_XXS_LEVELS),
        (28, "iq3-s", 32, IQ3_S_LEVELS),
    )
}  # fmt: skip
"""GGUF's IQ types, whose vectors are looked up while they load; "iq2" holds IQ1 and IQ2."""
LAYOUTS = STORED_LAYOUTS | ONLINE_LAYOUTS | VECTOR_LAYOUTS


@dataclass(frozen=True, eq=False)
class Segment:
    """Some outputs of one layout; `panels` is uint8 [ceil(outputs / 64), bytes of a panel]."""

    layout: BlockLayout
    outputs: int
    inputs: int
    panels: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A weight [outputs, inputs] made of segments that lie side by side along the outputs."""

    inputs: int
    segments: tuple[Segment, ...]

    @property
    def outputs(self) -> int:
        """Outputs of all segments."""
        return sum(segment.outputs for segment in self.segments)

    @property
    def x_group(self) -> int:
        """Inputs that share a scale of the activations."""
        (group,) = {segment.layout.x_group for segment in self.segments}
        return group

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """(layout, outputs) of each segment: what a kernel is chosen by."""
        return tuple((segment.layout.name, segment.outputs) for segment in self.segments)


def empty_segment(layout: BlockLayout, outputs: int, inputs: int) -> Segment:
    """A segment of zeros, to be packed into."""
    shape = (-(-outputs // PANEL), layout.panel_bytes(inputs))
    return Segment(layout, outputs, inputs, huge_pages.kept(shape, torch.uint8))


def read_rows(
    segment: Segment, rows_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of some outputs: quantized values without their offset (int16 [N, I]), scales and minima
    (float32 [N, G], one for each `part` inputs; minima None where the layout has none)."""
    layout = segment.layout
    blocks = segment.panels[rows_N // PANEL].view(len(rows_N), -1, layout.block_bytes)
    header = blocks[..., : layout.header_bytes].contiguous().view(layout.dtype)
    groups = blocks[..., layout.header_bytes :].unflatten(2, (layout.block // GROUP, -1))
    column_N = rows_N % PANEL
    header = header.float() if layout.dtype.itemsize == 1 else header  # there is no gather of them
    scale = _column(header.unflatten(2, (-1, PANEL)), column_N).float()
    small = groups[..., : layout.scale_bytes].contiguous().view(torch.int8)
    parts = layout.block // layout.part
    scales = scale if layout.scaled_parts else scale[..., 0, None].expand(-1, -1, parts)
    minima = scale[..., -1, None].expand(-1, -1, parts) if layout.minimum else None
    if layout.two_level:
        of_group = _column(small.unflatten(3, (2 if layout.minimum else 1, -1, PANEL)), column_N)
        scales = scales * of_group[..., 0, :].flatten(2).float()
        minima = minima * of_group[..., 1, :].flatten(2).float() if minima is not None else None
    planes = groups[..., layout.scale_bytes :].unflatten(3, (-1, PANEL, 4))
    words = planes[torch.arange(len(rows_N)), :, :, :, column_N]
    quantized = _unpack(layout, words).flatten(1)[:, : segment.inputs]
    return quantized, scales.flatten(1), None if minima is None else minima.flatten(1)


def _column(values: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
    """values [N, ..., 64] -> [N, ...] at each row's column."""
    index = column_N.view(-1, *[1] * (values.dim() - 1)).expand(*values.shape[:-1], 1)
    return values.gather(-1, index)[..., 0]


def _unpack(layout: BlockLayout, words: torch.Tensor) -> torch.Tensor:
    """Planes [..., bits, 4] of one output each -> quantized values int16 [..., 32]."""
    base = {3: 2, 5: 4, 6: 4}.get(layout.bits, layout.bits)
    low = [words[..., :base, :] >> shift & (1 << base) - 1 for shift in range(0, 8, base)]
    quantized = torch.stack(low, -2).flatten(-3).to(torch.int16)
    if extra := layout.bits - base:
        high = [words[..., base:, :] >> shift & (1 << extra) - 1 for shift in range(0, 8, extra)]
        quantized |= torch.stack(high, -2).flatten(-3).to(torch.int16) << base
    if layout.levels:
        return torch.tensor(layout.levels, dtype=torch.int16)[quantized.long()]
    return quantized - layout.offset


def dequantize_rows(segment: Segment, rows_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, I] of some outputs, in the order of operations of the format: value * scale, less
    the minimum."""
    quantized, scales, minima = read_rows(segment, rows_N)
    part, inputs = segment.layout.part, segment.inputs
    values = quantized.float() * scales.repeat_interleave(part, 1)[:, :inputs]
    if minima is not None:
        values -= minima.repeat_interleave(part, 1)[:, :inputs]
    return values


def write_quantized(
    segment: Segment,
    first: int,
    quantized_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    minima_OG: torch.Tensor | None,
) -> None:
    """Fills the panels from number `first` on, in a layout of one level: int8 values without their
    offset (with `levels`, those), float32 scales and minima that the layout's dtype holds
    exactly."""
    layout = segment.layout
    rows, inputs = quantized_OI.shape
    count = -(-rows // PANEL)
    missing = count * PANEL - rows
    if layout.levels:
        place = torch.zeros(256, dtype=torch.uint8)
        for i, level in reversed(list(enumerate(layout.levels))):
            place[level % 256] = i
        quantized_OI = place[quantized_OI.to(torch.uint8).int()]
    quantized = (
        F.pad(quantized_OI, (0, -inputs % layout.block, 0, missing)).to(torch.int16) + layout.offset
    ).to(torch.uint8)
    blocks = segment.panels[first : first + count].view(count, -1, layout.block_bytes)
    parts = [scales_OG] if minima_OG is None else [scales_OG, minima_OG]
    if layout.scaled_parts:
        each = layout.block // layout.part
        spread = F.pad(scales_OG, (0, -scales_OG.shape[1] % each))
        parts = [spread[:, i::each] for i in range(each)]
    header = torch.stack(
        [F.pad(part, (0, 0, 0, missing)).reshape(count, PANEL, -1) for part in parts], 1
    )
    blocks[..., : layout.header_bytes].view(layout.dtype).copy_(
        header.permute(0, 3, 1, 2).flatten(2)
    )
    words = quantized.view(torch.int32).view(count, PANEL, -1, GROUP // 4)
    if layout.bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    planes = words.permute(0, 2, 3, 1).reshape(count, blocks.shape[1], -1)
    blocks[..., layout.header_bytes :].view(torch.int32).copy_(planes)
