"""Integers whose rows of groups lie in parts of words: HQQ, SINQ and Quanto.

A weight [O, I] is seen as rows of one group each (along the inputs) or as columns of one group each
(axis 0). The rows of that matrix lie in as many parts as a word has fields, the first part in the
highest bits (of Quanto in the lowest): 32-bit words for 3, 5 and 6 bits, else bytes. Source: hqq
0.2.8 and sinq 0.2, `BitPack`; optimum-quanto 0.2.7, `PackedTensor`.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups
from headrace.base.config.further_arrangements import SINQ_PARTS, WORD_FIELDS
from headrace.base.config.levels import LEVELS
from headrace.base.config.quantized_tensors import QuantizedTensor


def by_input(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """HQQ: (value - zero) * scale, of groups of neighbouring inputs: matrix [O G, I / G], scales
    and zero points [O G, 1]."""
    values, span = _rows(tensor, read, rows)
    return Groups(
        values_RC=values[:, columns],
        scales_RG=read("scales", span).reshape(len(values), -1),
        zeros_RG=read("zeros", span).reshape(len(values), -1),
        group_C=_groups(tensor, columns, values.device),
    )


def quanto(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * scale - shift, or (value - shift) * scale where shifts are integers."""
    values, span = _rows(tensor, read, rows)
    shifts = read("zeros").reshape(-1, 1)[span].reshape(len(values), -1)
    floats = shifts.is_floating_point()
    return Groups(
        values_RC=values[:, columns],
        scales_RG=read("scales").reshape(-1, 1)[span].reshape(len(values), -1),
        zeros_RG=None if floats else shifts,
        added_RG=-shifts.float() if floats else None,
        group_C=_groups(tensor, columns, values.device),
    )


def sinq(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """(value - zero) * scale, times a scale of the input [1, I]."""
    values, span = _rows(tensor, read, rows)
    groups = Groups(
        values_RC=_levels(tensor, values[:, columns]),
        scales_RG=_auxiliary(tensor, read, "scales")[span].reshape(len(values), -1),
        zeros_RG=_auxiliary(tensor, read, "zeros")[span].reshape(len(values), -1),
        group_C=_groups(tensor, columns, values.device),
    )
    return groups.times_inputs(read("columns", slice(None), columns)[0])


def sinq_tiles(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """(value - zero) * scale of the row * scale of the column, of square tiles: scales and zero
    points lie tile by tile, tiles row by row."""
    values, _ = _rows(tensor, read, rows)
    size, across = _size(tensor), tensor.shape[1] // _size(tensor)
    tile_R, row_R = _tile_and_place(rows, size, values.device)
    tile_C, column_C = _tile_and_place(columns, size, values.device)
    tile_RC = tile_R[:, None] * across + tile_C
    scales, zeros = (
        _auxiliary(tensor, read, role).view(-1, size)[tile_RC, row_R[:, None]]
        for role in ("scales", "zeros")
    )
    numbers = _levels(tensor, values[:, columns]).float()
    weight = (numbers - zeros) * scales * read("columns").float()[tile_RC, 0, column_C]
    return Groups(values_RC=weight, scales_RG=weight.new_ones(1, 1))


def _tile_and_place(
    span: slice, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(span.start, span.stop, device=device)
    return places // size, places % size


def _levels(tensor: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """What the indices of levels of normal values stand for."""
    kind = tensor.numbers.arrangement.rpartition("-")[2]
    if kind not in LEVELS:
        return values
    return torch.tensor(LEVELS[kind], device=values.device)[values.int()]


def _auxiliary(tensor: QuantizedTensor, read: Read, role: str) -> torch.Tensor:
    """float32 [O G]: floats, or bytes [R, N] with a step and a minimum for each column."""
    if role in tensor.members:
        return read(role).float().flatten()
    values, steps, minima = (read(part).float() for part in SINQ_PARTS[role])
    return (values * steps + minima).flatten()


def _size(tensor: QuantizedTensor) -> int:
    """Inputs of a group, of which rows are made."""
    assert tensor.numbers.group is not None, tensor
    return tensor.numbers.group[1] or tensor.shape[1]


def _groups(tensor: QuantizedTensor, columns: slice, device: torch.device) -> torch.Tensor | None:
    size = _size(tensor)
    return column_groups(columns, 0 if size == tensor.shape[1] else size, device)


def _rows(tensor: QuantizedTensor, read: Read, rows: slice) -> tuple[torch.Tensor, slice]:
    """The values of those rows of the weight [R, I], and the groups that they are."""
    outputs, inputs = tensor.shape
    per_row = inputs // _size(tensor)
    first, last = rows.start * per_row, rows.stop * per_row
    step = -(-outputs * per_row // _fields(tensor))
    parts = []
    for part in range(first // step, -(-last // step)):
        here = slice(max(first - part * step, 0), min(last - part * step, step))
        parts.append(_field(tensor, read("values", here), part))
    return torch.cat(parts).reshape(-1, inputs), slice(first, last)


def by_output(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Axis 0: matrix [group, O I / group], whose column is a group; scales and zero points [1, O I
    / group]. The weight's values follow each other along its rows."""
    outputs, inputs = tensor.shape
    assert tensor.numbers.group is not None, tensor
    size = tensor.numbers.group[1]
    across = outputs * inputs // size
    step = -(-size // _fields(tensor))
    first, last = rows.start * inputs, rows.stop * inputs
    runs = []
    for row in range(first // across, -(-last // across)):
        here = slice(max(first - row * across, 0), min(last - row * across, across))
        words = read("values", slice(row % step, row % step + 1), here)
        values = _field(tensor, words, row // step).float()
        scales, zeros = read("scales", slice(None), here), read("zeros", slice(None), here)
        runs.append(((values - zeros.float()) * scales.float()).flatten())
    weight = torch.cat(runs).view(-1, inputs)[:, columns]
    return Groups(values_RC=weight, scales_RG=weight.new_ones(1, 1))


def _fields(tensor: QuantizedTensor) -> int:
    """Fields of a word."""
    return WORD_FIELDS[tensor.numbers.bits]


def _field(tensor: QuantizedTensor, words: torch.Tensor, part: int) -> torch.Tensor:
    bits = tensor.numbers.bits
    place = part if tensor.numbers.arrangement == "quanto-packed" else _fields(tensor) - 1 - part
    return ((words >> place * bits) & ((1 << bits) - 1)).to(torch.int16)
