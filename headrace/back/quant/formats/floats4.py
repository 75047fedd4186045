"""e2m1 numbers, two to a byte, lowest first, with a scale for 16 inputs (NVFP4: e4m3, and one
float32 for all) or for 32 (MXFP4: powers of two).

Source: Open Compute Project, Microscaling Formats (MX) 1.0, section 5.3; NVFP4 as ModelOpt 0.29 and
compressed-tensors 0.9 write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups
from headrace.back.quant.formats.scaled import powers_of_two
from headrace.base.config.levels import LEVELS
from headrace.base.config.quantized_tensors import QuantizedTensor

Reader = Callable[[QuantizedTensor, Read, slice, slice], Groups]
E2M1 = LEVELS["e2m1"]


def modelopt(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * scale * outer."""
    return _nvfp4(tensor, read, rows, columns, read("outer").float())


def compressed(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * scale / outer."""
    return _nvfp4(tensor, read, rows, columns, 1 / read("outer").float())


def _nvfp4(
    tensor: QuantizedTensor, read: Read, rows: slice, columns: slice, outer: torch.Tensor
) -> Groups:
    scales = read("scales", rows, slice(None)).float() * outer.reshape(1, 1)
    return _grouped(tensor, _values(read, rows, columns), scales, columns)


def powers(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * 2 ** (scale - 127)."""
    scales = powers_of_two(read("scales", rows, slice(None)))
    return _grouped(tensor, _values(read, rows, columns), scales, columns)


def mxint4(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """AutoRound's MXINT4: quarters from 0 to 7 of them and a sign, times 2 ** (scale - 127)."""
    bits = _bits(read, rows, columns).to(torch.int8)
    values = torch.where(bits > 7, 8 - bits, bits).float() / 4
    return _grouped(tensor, values, powers_of_two(read("scales", rows, slice(None))), columns)


def e5m3(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """AutoRound's NVFP4 without an outer scale: those of groups are bytes of five bits of exponent
    and three of mantissa, without a sign."""
    stored = read("scales", rows, slice(None)).int()
    exponents, parts = stored >> 3, (stored & 7) / 8
    scales = torch.where(
        exponents == 0, parts * 2**-14, torch.ldexp(1 + parts, exponents - 15)
    ).masked_fill(stored == 255, math.nan)
    return _grouped(tensor, _values(read, rows, columns), scales, columns)


def in_tiles(reader: Reader) -> Reader:
    """A reader of Four Over Six's arrangement: scales [O, G] lie as Blackwell's tensor cores take
    them, 128 outputs by 4 groups: [32, 4, 4] of outputs 32 apart. With e4m3 scales the largest
    magnitude of the weight stands for `largest`. Source: fouroversix 1.0; CUTLASS, scale factor
    layouts."""

    def read_tiled(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
        groups = read("values", slice(0, 1)).shape[1] * 2 // (tensor.numbers.group or (1, 16))[1]

        def read_plain(role: str, *cuts: slice) -> torch.Tensor:
            if role == "outer":
                return read("outer").float() / tensor.numbers.largest
            if role != "scales":
                return read(role, *cuts)
            blocks = slice(cuts[0].start // 128, -(-cuts[0].stop // 128))
            stored = read("scales", slice(blocks.start * 128 * groups, blocks.stop * 128 * groups))
            tiles = stored.view(torch.uint8).view(-1, groups // 4, 32, 4, 4)
            scales = tiles.permute(0, 3, 2, 1, 4).reshape(-1, groups).view(stored.dtype)
            return scales[cuts[0].start - blocks.start * 128 :][: cuts[0].stop - cuts[0].start]

        return reader(tensor, read_plain, rows, columns)

    return read_tiled


def in_words(reader: Reader) -> Reader:
    """A reader of MLX's arrangement: numbers lie in words of 32 bits, the first in the lowest, and
    scales are bytes."""

    def read_words(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
        def read_bytes(role: str, *cuts: slice) -> torch.Tensor:
            if role == "outer":
                scale = read("scales", slice(0, 1), slice(0, 1))
                return torch.ones(1, device=scale.device)
            if role != "values":
                scales = read(role, *cuts)
                nvfp4 = tensor.numbers.arrangement == "mlx-nvfp4"
                return scales.view(torch.float8_e4m3fn) if nvfp4 else scales
            first, last, _ = cuts[1].indices(tensor.shape[1] * tensor.numbers.bits // 8)
            words = read(role, cuts[0], slice(first // 4, -(-last // 4)))
            return words.contiguous().view(torch.uint8)[:, first % 4 :][:, : last - first]

        return reader(tensor, read_bytes, rows, columns)

    return read_words


def microscaled(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """e4m3 numbers times powers of two."""
    values = read("values", rows, columns).view(torch.float8_e4m3fn)
    return _grouped(tensor, values, powers_of_two(read("scales", rows, slice(None))), columns)


def gpt_oss(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """The same, from values [O, I / 32, 16] where the weight is [I, O]: rows are inputs."""
    groups = slice(rows.start // 32, -(-rows.stop // 32))
    blocks = read("values", columns, groups, slice(None))
    values_CR = _levels(blocks).flatten(1)[:, rows.start - groups.start * 32 :]
    scales_CG = powers_of_two(read("scales", columns, groups))
    group_R = torch.arange(rows.start, rows.stop, device=blocks.device) // 32 - groups.start
    values_RC = values_CR[:, : rows.stop - rows.start].t() * scales_CG.t()[group_R]
    return Groups(values_RC=values_RC, scales_RG=values_RC.new_ones(1, 1))


def bits(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """`powers`, with the bits of e2m1 for values, and the scales of all groups."""
    scales = powers_of_two(read("scales", rows, slice(None)))
    return _grouped(tensor, _bits(read, rows, columns), scales, columns)


def modelopt_bits(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """`modelopt`, with the bits of e2m1 for values, and the scales of all groups."""
    return _nvfp4_bits(tensor, read, rows, columns, read("outer").float())


def compressed_bits(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """`compressed` likewise."""
    return _nvfp4_bits(tensor, read, rows, columns, 1 / read("outer").float())


def _nvfp4_bits(
    tensor: QuantizedTensor, read: Read, rows: slice, columns: slice, outer: torch.Tensor
) -> Groups:
    scales = read("scales", rows, slice(None)).float() * outer.reshape(1, 1)
    return _grouped(tensor, _bits(read, rows, columns), scales, columns)


def _bits(read: Read, rows: slice, columns: slice) -> torch.Tensor:
    """uint8, a byte a number."""
    halves = slice(columns.start // 2, -(-columns.stop // 2))
    values = _both(read("values", rows, halves))[:, columns.start % 2 :]
    return values[:, : columns.stop - columns.start]


def gpt_oss_bits(tensor: QuantizedTensor, read: Read, inputs: slice, outputs: slice) -> Groups:
    """`gpt_oss` likewise, as it is stored: its rows are outputs."""
    groups = slice(inputs.start // 32, -(-inputs.stop // 32))
    values = _both(read("values", outputs, groups, slice(None))).flatten(1)
    values = values[:, inputs.start % 32 :][:, : inputs.stop - inputs.start]
    scales = powers_of_two(read("scales", outputs, slice(None)))
    return _grouped(tensor, values, scales, inputs)


def _grouped(
    tensor: QuantizedTensor, values: torch.Tensor, scales: torch.Tensor, columns: slice
) -> Groups:
    assert tensor.numbers.group is not None, tensor
    group = column_groups(columns, tensor.numbers.group[1], values.device)
    return Groups(values_RC=values, scales_RG=scales, group_C=group)


def _values(read: Read, rows: slice, columns: slice) -> torch.Tensor:
    halves = slice(columns.start // 2, -(-columns.stop // 2))
    values = _levels(read("values", rows, halves))
    first = columns.start % 2
    return values[:, first : first + columns.stop - columns.start]


def _levels(packed: torch.Tensor) -> torch.Tensor:
    """float32 numbers of bytes, twice as many along the last dimension."""
    return torch.tensor(E2M1, device=packed.device)[_both(packed).int()]


def _both(packed: torch.Tensor) -> torch.Tensor:
    """The halves of bytes, uint8, twice as many along the last dimension."""
    packed = packed.view(torch.uint8)  # DeepSeek's are int8
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
