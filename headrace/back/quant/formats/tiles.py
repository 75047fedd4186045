"""Integers in the order in which GPUs' tensor cores take them: Marlin's tiles, dense and 2:4
sparse, tinygemm's and those of EETQ. Each is put back into rows of outputs.

Source: the layouts as AutoGPTQ 0.7 and AutoAWQ 0.2 (`marlin`), compressed-tensors 0.9
(`marlin-24`), PyTorch 2.13 (`_convert_weight_to_int4pack`, CUDA) and EETQ 1.0 write them. O
outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups, fields
from headrace.base.config.quantized_tensors import QuantizedTensor

STRIP = 64
"""Outputs of four tiles that lie in one run; scales are reordered within as many."""


def marlin(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """4 bits with 8 added, in tiles of 16 inputs x 16 outputs [I / 16, 2 O]; scales [G, O]."""
    strips, tiles = _over(rows, STRIP), _over(columns, 16)
    values = _tiles(read, strips, tiles, bits=4, order=_marlin_order())
    values = values[_within(rows, strips, STRIP), _within(columns, tiles, 16)]
    stored = read("scales", slice(None), _times(strips, STRIP))
    order = _SCALES_OF_ALL if len(stored) == 1 else _SCALES
    return Groups(
        values_RC=values - 8,
        scales_RG=_unordered(stored, order).t()[_within(rows, strips, STRIP)],
        group_C=_groups(tensor, columns, values.device),
    )


def marlin_sparse(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """4 or 8 bits with half their range added, two of each four inputs: tiles of 16 of the kept
    ones [I / 32, 16 O bits / 32]; their places `bitmask`, int16 [I / 32, 2 O]; scales [G, O]."""
    bits, inputs = tensor.numbers.bits, tensor.shape[1]
    strips, tiles = _over(rows, STRIP), _over(columns, 32)
    kept = _tiles(read, strips, tiles, bits=bits, order=_sparse_order(bits)) - (1 << bits - 1)
    places = _places(read("bitmask", tiles, _times(strips, 2 * STRIP)))
    quads = kept.new_zeros(*places.shape[:2], 4)
    quads.scatter_(2, places, kept.unflatten(1, (-1, 2)))
    values = quads.flatten(1)[_within(rows, strips, STRIP), _within(columns, tiles, 32)]
    stored = read("scales", slice(None), _times(strips, STRIP))
    size = (tensor.numbers.group or (1, 0))[1]
    if 0 < size < inputs // 2:
        stored = _unordered(stored, _SPARSE_SCALES)
    return Groups(
        values_RC=values,
        scales_RG=stored.t()[_within(rows, strips, STRIP)],
        group_C=_groups(tensor, columns, values.device),
    )


def tinygemm(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """4 bits, [O / 8, I / (16 T), 32, T / 2] for T tiles of 16 inputs to a run; a scale and what is
    added [G, O, 2]: (value - 8) * scale + added. A word holds two tiles' inputs of one output."""
    runs, width = _over(rows, 8), 32 * _thread_words(read)
    spans = _over(columns, width)
    words = read("values", runs, spans)
    order = torch.tensor(_FIELDS, device=words.device) * 4
    nibbles = ((words[..., None] >> order) & 15).to(torch.int16)
    # [O / 8, spans, 8 outputs, 4 threads, words, fields]; a field is [tile, half, input of two].
    nibbles = nibbles.unflatten(-1, (2, 2, 2)).unflatten(2, (8, 4))
    values = nibbles.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(8 * len(words), -1)
    pairs = read("scales", slice(None), rows).float()
    scales, added = pairs[..., 0].t(), pairs[..., 1].t()
    return Groups(
        values_RC=values[_within(rows, runs, 8), _within(columns, spans, width)],
        scales_RG=scales,
        added_RG=added - 8 * scales,
        group_C=_groups(tensor, columns, words.device),
    )


def _thread_words(read: Read) -> int:
    """Words of a thread: half as many as tiles of inputs lie in one run."""
    return read("values", slice(0, 1), slice(0, 1)).shape[-1]


def eetq(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """int8 with 128 added and a scale for each output. Two outputs alternate every 64 inputs; of 16
    inputs 0, 1, 8, 9, 2, 3, 10, 11, ... follow each other; of four bytes the middle ones are
    swapped. The stored shape [I, O] says nothing of that."""
    outputs, inputs = tensor.shape
    pairs = _over(rows, 2)
    first, last = pairs.start * 2 * inputs, pairs.stop * 2 * inputs
    stored = slice(first // outputs, -(-last // outputs))
    run = read("values", stored).flatten()[first - stored.start * outputs :][: last - first]
    bytes_ = run.view(-1, 4)[:, (0, 2, 1, 3)].reshape(-1, inputs // STRIP, 2, STRIP)
    mixed = bytes_.transpose(1, 2).reshape(-1, 16)
    values = mixed[:, _inverse(_EETQ_INPUTS, run.device)].view(-1, inputs)
    values = (values.view(torch.uint8) ^ 128).view(torch.int8)
    return Groups(
        values_RC=values[_within(rows, pairs, 2), columns],
        scales_RG=read("scales", rows).float()[:, None],
    )


_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight fields, lowest first, holds value i of those it stands for."""
_EETQ_INPUTS = tuple(8 * (i % 4 // 2) + i % 2 + 2 * (i // 4) for i in range(16))
_SCALES = tuple(i + 8 * j for i in range(8) for j in range(8))
_SCALES_OF_ALL = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))
_SPARSE_SCALES = tuple(8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7))
"""Stored scale i of so many neighbours is that of the output that is named here."""


def _marlin_order() -> list[int]:
    """Which value of four tiles of 16 x 16, inputs first, stands where: a thread of a warp has two
    pairs of inputs of two outputs of each tile."""
    order = []
    for thread in range(32):
        pairs = [2 * (thread % 4) + at for at in (0, 1, 8, 9)]
        own = [16 * k + thread // 4 + half for half in (0, 8) for k in pairs]
        order += [256 * tile + at for tile in range(4) for at in own]
    return _interleaved(order, 4)


def _sparse_order(bits: int) -> list[int]:
    """The same of the sparse tiles, whose outputs a thread takes from one tile."""
    order = []
    for thread in range(32):
        pairs = [2 * (thread % 4) + at for at in (0, 1, 8, 9)]
        column = thread // 4
        first = 256 * (column // 2) + 8 * (column % 2)
        own = [16 * k + first + half for half in (0, 4) for k in pairs]
        order += [at + step for step in range(4) for at in own]
    return _interleaved(order, bits)


def _interleaved(order: list[int], bits: int) -> list[int]:
    """Even ones of a run before the odd ones: of eight values in 4 bits, of four in 8."""
    run = 32 // bits
    places = [*range(0, run, 2), *range(1, run, 2)]
    return [order[first + place] for first in range(0, len(order), run) for place in places]


def _tiles(read: Read, strips: slice, tiles: slice, *, bits: int, order: list[int]) -> torch.Tensor:
    """Unsigned values [outputs of the strips, inputs of the tiles], int16."""
    per_strip = STRIP * 16 * bits // 32
    words = read("values", tiles, _times(strips, per_strip)).unflatten(1, (-1, per_strip))
    values = fields(words, bits, 0, STRIP * 16)[..., _inverse(order, words.device)]
    tiled = values.unflatten(2, (4, 16, 16))  # [I / 16, O / 64, tile, input, output]
    return tiled.permute(1, 2, 4, 0, 3).reshape(STRIP * words.shape[1], 16 * len(words))


def _places(stored: torch.Tensor) -> torch.Tensor:
    """Of each four inputs the places of those that are kept, int64 [O, I / 4, 2]. CUTLASS mixes the
    outputs of a strip, and the two columns of a row; a word has four times two places of 2 bits."""
    tiles, device = len(stored), stored.device
    output = torch.arange(STRIP, device=device)[:, None]
    column = torch.arange(2, device=device)[None]
    row = (output % 2) * 2 + output % 8 // 4 + output % 4 // 2 * 32 + output // 8 * 4
    swap = (row % 2 == 0).int() * (column == 1) - (row % 2 == 1).int() * (column == 0)
    at = (row + swap) * 2 + (column - swap)
    words = stored.view(tiles, -1, 2 * STRIP)[..., at].permute(1, 2, 0, 3).reshape(-1, 2 * tiles)
    shifts = torch.arange(0, 16, 2, device=device)
    return ((words[..., None].long() >> shifts) & 3).view(len(words), -1, 2)


def _unordered(stored: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    runs = stored.unflatten(1, (-1, len(order)))
    return runs[..., _inverse(order, stored.device)].flatten(1)


def _inverse(order: list[int] | tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(order, device=device).argsort()


def _over(span: slice, size: int) -> slice:
    """The runs of that size that hold a span."""
    return slice(span.start // size, -(-span.stop // size))


def _times(runs: slice, size: int) -> slice:
    return slice(runs.start * size, runs.stop * size)


def _within(span: slice, runs: slice, size: int) -> slice:
    return slice(span.start - runs.start * size, span.stop - runs.start * size)


def _groups(tensor: QuantizedTensor, columns: slice, device: torch.device) -> torch.Tensor | None:
    assert tensor.numbers.group is not None, tensor
    return column_groups(columns, tensor.numbers.group[1], device)
