"""Weights as exllamav2 and exllamav3 store them.

EXL2: integers whose groups of inputs have 2 to 8 bits each. EXL3: a trellis (Tseng et al. 2024,
QTIP), whose 16 bits of state a hash turns into a value, of a weight that was rotated in blocks of
128 outputs and inputs. Source: exllamav2 0.3 and exllamav3 1.6. O outputs, I inputs, G groups.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby

import torch

from headrace.back.quant.formats.groups import Groups, Read, fields
from headrace.base.config.looked_up_arrangements import MULTIPLIERS, exl2_groups
from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError

BLOCK = 128
"""Outputs, and inputs, that are rotated together."""


def exl2(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Words [sum of bits, O] of fields along the inputs; of each group the root of a scale, less
    one, in 4 bits [G, O / 8], and what 256 of its square stands for [G]. `inverse` [I] says where
    an input stands."""
    words = read("values", slice(None), rows).t()
    groups = exl2_groups(read("groups").cpu().numpy().astype("<u2").tobytes(), words.shape[1])
    parts, first = [], 0
    for bits, run in groupby(groups, key=lambda group: group[0]):
        count = sum(size for _, size in run)
        last = first + count * bits // 32
        parts.append(fields(words[:, first:last], bits, 0, count) - (1 << bits - 1))
        first = last
    sizes = torch.tensor([size for _, size in groups], device=words.device)
    group = torch.arange(len(groups), device=words.device).repeat_interleave(sizes)
    eights = slice(rows.start // 8, -(-rows.stop // 8))
    roots = fields(read("scales", slice(None), eights), 4, rows.start % 8, rows.stop - rows.start)
    scales = (roots.float() + 1).square() * (read("largest").float() / 256)[:, None]
    places = torch.arange(columns.start, columns.stop, device=words.device)
    if "inverse" in tensor.members:
        places = _places(tensor, read("inverse"))[columns]
    return Groups(
        values_RC=torch.cat(parts, 1)[:, places], scales_RG=scales.t(), group_C=group[places]
    )


def _places(tensor: QuantizedTensor, stored: torch.Tensor) -> torch.Tensor:
    places = stored.long() & 0xFFFF if stored.dtype == torch.int16 else stored.long()
    if int(places.min()) < 0 or int(places.max()) >= len(places):
        raise CheckpointError(
            f"{tensor.members['inverse']}: names input {int(places.max())} of {len(places)}"
        )
    return places


def exl3(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """16 words of 16 bits for each bit of a value and tile of 16 x 16 [I / 16, O / 16, 16 bits];
    signs and scales of inputs and outputs, as floats, or signs alone as bits."""
    across = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
    along = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
    tiles = BLOCK // 16
    stored = read(
        "values",
        slice(along.start * tiles, along.stop * tiles),
        slice(across.start * tiles, across.stop * tiles),
    )
    kind = next((role for role in MULTIPLIERS if role in tensor.members), "")
    table = _codebook(kind).to(stored.device)
    rotated_IO = _untiled(table[_states(stored)])
    blocks = rotated_IO.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    hadamard = _hadamard().to(stored.device)
    blocks = torch.einsum("ij,ajbk,kl->aibl", hadamard, blocks, hadamard)
    weight_OI = blocks.flatten(2).flatten(0, 1).t()
    outputs = slice(across.start * BLOCK, across.stop * BLOCK)
    inputs = slice(along.start * BLOCK, along.stop * BLOCK)
    weight_OI = weight_OI * _signs(tensor, read, "sv", outputs)[:, None]
    weight_OI = weight_OI * _signs(tensor, read, "su", inputs)
    return Groups(
        values_RC=weight_OI[
            rows.start - outputs.start : rows.stop - outputs.start,
            columns.start - inputs.start : columns.stop - inputs.start,
        ],
        scales_RG=weight_OI.new_ones(1, 1),
    )


def _states(stored: torch.Tensor) -> torch.Tensor:
    """int64 [..., 256]: of value i the 16 bits that end with its own, of a ring of words of 32
    bits, highest first."""
    bits, device = stored.shape[-1] // 16, stored.device
    words = stored.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    ends = (torch.arange(256, device=device) + 1) * bits
    last = (ends - 1) // 32
    before = words.roll(1, -1)[..., last]
    pairs = (before << 32 | words[..., last]) >> ((last + 1) * 32 - ends)
    return pairs & 0xFFFF


def _untiled(values: torch.Tensor) -> torch.Tensor:
    """[I, O] of tiles whose values lie as a warp's threads take them: [8 outputs, 4 threads, half,
    pair, input of two]."""
    parts = values.unflatten(-1, (8, 4, 2, 2, 2))
    return parts.permute(0, 5, 3, 6, 1, 4, 2).flatten(4).flatten(0, 3)


def _signs(tensor: QuantizedTensor, read: Read, role: str, span: slice) -> torch.Tensor:
    if f"{role}h" in tensor.members:
        return read(f"{role}h", span).float()
    words = read(role, slice(span.start // 16, span.stop // 16)).long()
    bits = (words[:, None] >> torch.arange(16, device=words.device)) & 1
    return 1.0 - 2.0 * bits.flatten().float()


@cache
def _codebook(kind: str) -> torch.Tensor:
    """The values of all states, float32 [65536], rounded as half precision is."""
    states = torch.arange(1 << 16)
    if kind == "mul1":
        product = states * MULTIPLIERS[kind] & 0xFFFFFFFF
        total = sum((product >> shift) & 0xFF for shift in (0, 8, 16, 24)) + 1024.0
        factor, offset = (
            torch.tensor((0x1EEE, -0x36CF), dtype=torch.int16).view(torch.half).double()
        )
        return (total * factor + offset).half().float()
    product = states * MULTIPLIERS[kind] if kind else states * 89226354 + 64248484
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    halves = torch.stack((mixed & 0xFFFF, mixed >> 16), -1).to(torch.uint16).view(torch.half)
    return (halves[:, 0] + halves[:, 1]).float()


@cache
def _hadamard() -> torch.Tensor:
    """Of 128, orthogonal, in Sylvester's order."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / BLOCK**0.5
