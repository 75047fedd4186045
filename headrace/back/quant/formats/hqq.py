"""HQQ's integers of 1, 2, 3, 4 and 8 bits with float scales and zero points:
(value - zero) * scale.

A weight [O, I] is seen as rows of one group each (along the inputs) or as columns of one group each
(axis 0). The rows of that matrix lie in as many parts as a word has fields, the first part in the
highest bits: 32-bit words of ten fields for 3 bits, else bytes. Source: hqq 0.2.8, `BitPack`.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups
from headrace.base.config.quantized_tensors import QuantizedTensor


def by_input(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Groups of neighbouring inputs: matrix [O G, I / G], scales and zero points [O G, 1]."""
    outputs, inputs = tensor.shape
    assert tensor.numbers.group is not None, tensor
    size = tensor.numbers.group[1] or inputs
    per_row = inputs // size
    first, last = rows.start * per_row, rows.stop * per_row
    step = -(-outputs * per_row // _fields(tensor))
    parts = []
    for part in range(first // step, -(-last // step)):
        here = slice(max(first - part * step, 0), min(last - part * step, step))
        parts.append(_field(tensor, read("values", here), part))
    values = torch.cat(parts).reshape(-1, inputs)[:, columns]
    span = slice(first, last)
    return Groups(
        values_RC=values,
        scales_RG=read("scales", span).reshape(-1, per_row),
        zeros_RG=read("zeros", span).reshape(-1, per_row),
        group_C=column_groups(columns, tensor.numbers.group[1], values.device),
    )


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
    return 10 if tensor.numbers.bits == 3 else 8 // tensor.numbers.bits


def _field(tensor: QuantizedTensor, words: torch.Tensor, part: int) -> torch.Tensor:
    bits = tensor.numbers.bits
    shift = (_fields(tensor) - 1 - part) * bits
    return ((words >> shift) & ((1 << bits) - 1)).to(torch.int16)
