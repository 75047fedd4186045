"""Weights whose zeros are left out: the values of a row one after another, and for each place a
bit, lowest first, that says whether it holds one. Values are floats, or as in scaled.py.

Source: compressed-tensors 0.11 (`sparse-24-bitmask`, `sparse-bitmask`). O outputs, I inputs.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read
from headrace.back.quant.formats.scaled import shared
from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError


def two_of_four(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O, I / 2]: two of each four inputs."""
    values = read("values", rows).flatten()
    return _dense(tensor, read, values, rows, columns)


def any_pattern(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values of all rows in one run; `offsets` [O] says where each row's begin."""
    offsets, outputs = read("offsets"), tensor.shape[0]
    last = int(offsets[rows.stop]) if rows.stop < outputs else None
    values = read("values", slice(int(offsets[rows.start]), last))
    return _dense(tensor, read, values, rows, columns)


def _dense(
    tensor: QuantizedTensor, read: Read, values: torch.Tensor, rows: slice, columns: slice
) -> Groups:
    masks = read("bitmask", rows)
    places = torch.arange(8, device=masks.device)
    present = ((masks[..., None] >> places) & 1).flatten(1)[:, : tensor.shape[1]].bool()
    if int(present.sum()) != len(values):
        raise CheckpointError(
            f"{tensor.members['bitmask']}: rows {rows.start} to {rows.stop - 1} have "
            f"{int(present.sum())} bits set, but {len(values)} values in {tensor.members['values']}"
        )
    stored = values.view(torch.int8) if values.itemsize == 1 else values
    dense = torch.zeros(present.shape, dtype=stored.dtype, device=stored.device)
    dense = dense.masked_scatter_(present, stored).view(values.dtype)[:, columns]
    if "scales" not in tensor.members:
        return Groups(values_RC=dense, scales_RG=torch.ones(1, 1, device=dense.device))
    return shared(tensor, read, dense, rows, columns)
