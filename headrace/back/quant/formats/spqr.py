"""SpQR's tiles of 16 x 16: 3 bits a value, and a scale and zero point of 3 bits for 16 inputs of an
output, which have a scale and zero point of their own in each tile; and floats that are added.

A word of 64 bits holds, lowest first, scale, zero point and 16 values, then a byte: of a tile's
rows two by two these are four float16: the scales of scales and zero points, their zero points.
Products are rounded to float16, as its kernels do. Source: spqr_quant 0.2, `QuantizedLinear`.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, inverse_order
from headrace.base.config.looked_up_arrangements import SPQR_TILE as TILE
from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError


def spqr(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Whole tiles of those outputs, of all inputs; then what is added, then the inputs' order."""
    inputs = tensor.shape[1]
    tiles = slice(rows.start // TILE, -(-rows.stop // TILE))
    words_TJR = read("values", slice(tiles.start * inputs, tiles.stop * inputs))
    weight = _dense(words_TJR.view(-1, inputs // TILE, TILE))
    weight = _with_added(tensor, read, weight, tiles)
    first = rows.start - tiles.start * TILE
    weight = weight[first : first + rows.stop - rows.start]
    order = torch.arange(columns.start, columns.stop, device=weight.device)
    if "order" in tensor.members and (stored := read("order")).numel():
        order = inverse_order(tensor, stored.contiguous().view(torch.int16))[columns]
    return Groups(values_RC=weight[:, order], scales_RG=weight.new_ones(1, 1))


def _dense(words_TJR: torch.Tensor) -> torch.Tensor:
    """float32 [outputs, inputs] of words by tile row, tile and output of the tile."""
    shifts = torch.arange(0, 3 * (TILE + 2), 3, device=words_TJR.device)
    fields = ((words_TJR[..., None] >> shifts) & 7).half()
    pieces = ((words_TJR >> 3 * (TILE + 2)) & 255).to(torch.uint8).unflatten(2, (TILE // 2, 2))
    halves = (pieces[..., 0] | pieces[..., 1]).contiguous().view(torch.half)[:, :, None]
    scale = halves[..., 0] * (fields[..., 0] - halves[..., 2])
    zero = halves[..., 1] * (fields[..., 1] - halves[..., 3])
    values = scale[..., None] * (fields[..., 2:] - zero[..., None])
    return values.float().transpose(1, 2).flatten(2).flatten(0, 1)


def _with_added(
    tensor: QuantizedTensor, read: Read, weight: torch.Tensor, tiles: slice
) -> torch.Tensor:
    """With the floats of those tile rows: words of an input (16 bits) and a float16. Of outputs one
    by one, or of 16 together, whose floats take turns."""
    offsets, words = read("offsets").long(), read("added")
    interleaved = len(offsets) == tensor.shape[0] // TILE + 1
    per = 1 if interleaved else TILE
    starts = offsets[tiles.start * per : tiles.stop * per + 1]
    if bool((starts.diff() < 0).any()) or int(starts[0]) < 0 or int(starts[-1]) > len(words):
        raise CheckpointError(
            f"{tensor.members['offsets']}: names floats {int(starts[0])} to {int(starts[-1])} of "
            f"{len(words)}"
        )
    place = torch.arange(int(starts[0]), int(starts[-1]), device=words.device)
    row = torch.repeat_interleave(starts.diff())
    if interleaved:
        row = row * TILE + place % TILE
    words = words[place]
    column, added = words & 0xFFFF, (words >> 16).to(torch.int16).view(torch.half).float()
    if len(column) and int(column.max()) >= tensor.shape[1]:
        raise CheckpointError(
            f"{tensor.members['added']}: names input {int(column.max())} of {tensor.shape[1]}"
        )
    return weight.index_put((row, column.long()), added, accumulate=True)
