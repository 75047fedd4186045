"""QuIP#'s weights (Tseng et al. 2024): vectors of eight inputs from the lattice E8, of a weight
whose inputs and outputs were multiplied by signs and rotated as a whole. Source: quip-sharp of July
2024, `lib/codebook`.

E8P: 256 vectors of halves without signs, times signs, a quarter more or less, 16 bits in all; for 3
and 4 bits a second vector, of 256 or of E8P again, is divided by a number and added. O outputs, I
inputs.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

from headrace.back.quant.formats.groups import Groups, Read
from headrace.back.quant.formats.rotations import rotated_whole
from headrace.base.config.quantized_tensors import QuantizedTensor

_TWELVES = (
    0x8F, 0x4F, 0x2F, 0x1F, 0xEC, 0xEA, 0xE6, 0xE9, 0xE5, 0xE3, 0xDC, 0xDA, 0xD6, 0xD9, 0xD5,
    0xD3, 0xBC, 0xBA, 0xB6, 0xB9, 0xB5, 0x73, 0x7C, 0x7A, 0x76, 0x79, 0x75, 0x37, 0xCE,
)  # fmt: skip
"""The vectors of five 3/2 and three 1/2 that were chosen; a bit, the first input highest: 3/2."""
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of eight signs is that of input i."""


def quip(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """The whole weight, of which a rectangle is taken: SV * (H_O @ vectors @ H_I^T) * SU."""
    numbers, stored = tensor.numbers, read("values")
    outputs, bits = len(stored), numbers.bits
    words = stored.shape[1] * 2 // bits
    vectors = _e8p(stored[:, :words])
    if bits == 3:
        vectors = vectors + _roots(stored[:, words:]) / numbers.divisor
    if bits == 4:
        vectors = vectors + _e8p(stored[:, words:]) / numbers.divisor
    by_input = rotated_whole(vectors)  # rows times H_I^T
    weight_OI = rotated_whole(by_input.t().contiguous()).t()
    signs_O = read("output_signs").float() * read("scale").float()
    if "merged_scales" in tensor.members:
        signs_O = signs_O * _by_output(tensor, read("merged_scales").float(), outputs)
    first = tensor.first_row
    span = slice(first + rows.start, first + rows.stop)
    part = weight_OI[span, columns] * signs_O[span, None] * read("input_signs", columns).float()
    return Groups(values_RC=part, scales_RG=part.new_ones(1, 1))


def _by_output(tensor: QuantizedTensor, scales: torch.Tensor, outputs: int) -> torch.Tensor:
    sizes = torch.tensor(tensor.merged_rows, device=scales.device)
    assert int(sizes.sum()) == outputs, (tensor.name, tensor.merged_rows, outputs)
    return scales.repeat_interleave(sizes)


def _e8p(words_OW: torch.Tensor) -> torch.Tensor:
    """float32 [O, I] of words of 64 bits: of two outputs x two vectors the indices of magnitudes in
    the lower half, signs in the upper, the four taking turns bit by bit; 8 pairs of outputs x 4
    pairs of vectors follow each other."""
    outputs, width = words_OW.shape
    tiles = words_OW.reshape(outputs // 16, width // 2, 8, 4).transpose(1, 2)
    words = tiles.reshape(outputs // 2, width * 2)  # a pair of outputs, a pair of vectors
    place = torch.arange(4, device=words.device)
    magnitude = (words[..., None] >> 8 * place) & 255
    shifts = 32 + place[:, None] + 4 * torch.arange(8, device=words.device)
    signs = (words[..., None, None] >> shifts) & 1  # [pairs, pairs, 4, 8]
    odd = signs.sum(-1) & 1
    signs[..., 0] ^= odd
    order = torch.tensor(_PLACES, device=words.device)
    values = _magnitudes().to(words.device)[magnitude] * (1 - 2 * signs[..., order])
    values = values + (0.25 - 0.5 * odd[..., None])
    # [pair of outputs, pair of vectors, vector of two, output of two, 8]
    return values.unflatten(2, (2, 2)).permute(0, 3, 1, 2, 4).reshape(outputs, -1)


@cache
def _magnitudes() -> torch.Tensor:
    """float32 [256, 8]: the last input takes the sign that makes their sum even."""
    near = [one for one in product((0.5, 1.5, 2.5), repeat=8) if sum(x * x for x in one) <= 10]
    far = [tuple(1.5 if bits >> 7 - i & 1 else 0.5 for i in range(8)) for bits in _TWELVES]
    table = torch.tensor(near + far)
    table[:, 7] *= 1 - 2 * (table.sum(1) % 2)
    return table


def _roots(words_OW: torch.Tensor) -> torch.Tensor:
    """float32 [O, I] of words of eight bytes, each an index."""
    shifts = 8 * torch.arange(8, device=words_OW.device)
    index = (words_OW[..., None] >> shifts) & 255
    return _short().to(words_OW.device)[index].flatten(1)


@cache
def _short() -> torch.Tensor:
    """float32 [256, 8]: 0, the 240 roots of E8, and 15 vectors of one 2."""
    whole = [one for one in product((-1, 0, 1), repeat=8) if sum(map(abs, one)) <= 2]
    halves = product((-0.5, 0.5), repeat=8)
    even = [one for one in (*whole, *halves) if sum(one) % 2 == 0]
    twos = [[2.0 * (i == j) for j in range(8)] for i in range(8)]
    twos += [[-2.0 * (i == j) for j in range(8)] for i in range(7)]
    return torch.tensor([list(map(float, one)) for one in even] + twos)
