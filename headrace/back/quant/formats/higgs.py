"""HIGGS's pairs of inputs, as FLUTE's kernels take them: indices of 2, 3 and 4 bits in words of 16
bits, whose outputs and inputs are mixed by tiles; looked up two by two, times a scale of a group,
then rotated back in blocks.

A row of words has one input. In a tile of T outputs lie those that are T apart, of two inputs: the
second input's before the first's. Source: flute 0.4 (Guo et al. 2024), `utils`; transformers 5,
`integrations.higgs`. O outputs, I inputs, K pairs of inputs, N tiles of outputs.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read
from headrace.back.quant.formats.rotations import rotated_back
from headrace.base.config.looked_up_arrangements import higgs_chunk
from headrace.base.config.quantization import Codebook
from headrace.base.config.quantized_tensors import QuantizedTensor

_THREES = (*range(0, 15, 3), *range(1, 15, 3), *range(2, 15, 3), 15)
"""Which of 16 outputs T apart lies where, of 3 bits."""


def higgs(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Whole tiles of outputs and blocks of inputs, of which a rectangle is taken."""
    book, group = tensor.numbers.codebook, tensor.numbers.group
    assert book is not None and group is not None, tensor
    chunk, block = higgs_chunk(book), book.rotated
    tiles = slice(rows.start // chunk, -(-rows.stop // chunk))
    blocks = slice(columns.start // block * block, -(-columns.stop // block) * block)
    index_KXO = _indices(tensor, read, tiles, blocks, book)
    scales = read("scales", slice(tiles.start * chunk, tiles.stop * chunk))
    pairs = read("pairs").contiguous().view(scales.dtype).float()
    values_KOX = pairs[index_KXO[:, 0], index_KXO[:, 1]]
    values_OI = values_KOX.permute(1, 0, 2).flatten(1)
    of_group = torch.arange(blocks.start, blocks.stop, device=scales.device) // group[1]
    weight = rotated_back(values_OI * scales.float()[:, of_group], block)
    first = rows.start - tiles.start * chunk
    part = weight[first : first + rows.stop - rows.start]
    part = part[:, columns.start - blocks.start :][:, : columns.stop - columns.start]
    return Groups(values_RC=part, scales_RG=part.new_ones(1, 1))


def _indices(
    tensor: QuantizedTensor, read: Read, tiles: slice, blocks: slice, book: Codebook
) -> torch.Tensor:
    """int64 [K, 2, O]."""

    def words(first: int, per_tile: int) -> torch.Tensor:
        """[K, 2, N, words of a tile], from a first row of words on."""
        span = slice(first + tiles.start * per_tile, first + tiles.stop * per_tile)
        stored = read("values", span, blocks).t().long() & 0xFFFF
        return stored.reshape(-1, 2, tiles.stop - tiles.start, per_tile)

    if book.bits == 3:
        outputs = tensor.shape[0]
        low = words(0, book.tile)
        high = words(outputs // 16, 2 * book.tile).unflatten(3, (2, book.tile))
        fields = _threes(low, high[..., 0, :], high[..., 1, :])
        second, first = fields.unflatten(-1, (16, 2)).unbind(-1)
        order = torch.tensor(_THREES, device=fields.device).argsort()
        both = torch.stack((first, second), 1)[..., order]  # [K, 2, N, T, 16]
        return both.transpose(3, 4).flatten(2)
    count = 16 // book.bits
    shifts = torch.arange(0, 16, book.bits, device=read("scales", slice(0, 1)).device)
    fields = (words(0, book.tile)[..., None] >> shifts) & ((1 << book.bits) - 1)
    # word h of both has outputs h count / 2 on, of each the second input before the first
    second, first = fields.unflatten(-1, (count // 2, 2)).unbind(-1)  # [K, h, N, T, count / 2]
    both = torch.stack((first, second), 1)  # [K, 2, h, N, T, count / 2]
    return both.permute(0, 1, 3, 2, 5, 4).flatten(2)


def _threes(*words: torch.Tensor) -> torch.Tensor:
    """32 fields of 3 bits [K, N, T, 32]: of each three pairs of words 16 and 14 bits make ten of
    them, the two highest of the second words the last two."""
    parts, last = [], torch.zeros_like(words[0][:, 0])
    for place, word in enumerate(words):
        run = word[:, 0] | (word[:, 1] & 0x3FFF) << 16
        parts.append((run[..., None] >> torch.arange(0, 30, 3, device=run.device)) & 7)
        last = last | (word[:, 1] >> 14) << 2 * place
    parts.append((last[..., None] >> torch.arange(0, 6, 3, device=last.device)) & 7)
    return torch.cat(parts, -1)
