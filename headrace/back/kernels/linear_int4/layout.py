"""Weights of 4-bit numbers as GPUs read them: every thread finds the values of its part of a matrix
instruction beside each other.

O outputs, I inputs, T tokens, G groups of neighbouring inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.base.config.levels import LEVELS

ROWS = 64
"""Outputs of a tile."""
BLOCK = 128
"""Inputs of a block. Inputs are padded to a multiple, with scale 0."""
OFFSET = 8
"""What a symmetric value is stored above itself."""
LIFT = 2.0**110
"""What bfloat16 scales of e2m1 numbers are stored times: their bits, moved to where a bfloat16
number has its own, are 2 ** 126 too small, and one product brings them near enough
(gluon_unpack.py)."""
LARGEST_LIFTED = 2.0**17
"""The largest such scale."""
GROUPS = (16, 32, 64, 128)
"""Inputs that may share a scale, where not all do."""


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A weight [O, I]: (q - 8) * scale, or with minima q * scale - minimum, of integers q in 0 ..
    15; if `floats`, the `levels` (see LEVELS) of bits q times scale. `group` inputs of an output
    share a scale (and minimum), None: all of them.

    words_NBW    int32 [O / 64, I / 128, 1024], rounded up: a tile's block is two halves of 64
                 inputs, and each 128 threads' four words, one for each sixteen inputs. Thread t of
                 a quarter of the warps holds of those outputs t / 32 * 16 + t / 4 % 8 and 8 more,
                 and inputs t % 4 * 2 and 1, 8 and 9 more: of bits e1 (output + 8), e2 (input + 8)
                 and e0 (input + 1) it is nibble e1 + 2 e2 + 4 e0 (PTX ISA, 9.7.15.5.1: matrix
                 fragments of wgmma.m64nNk16)
    scales_NBSR  model dtype [O / 64, I / 128 or 1, S, 32]: of each block's groups the scales of
                 outputs without bit 8, then of those with it, then minima in the same way; of
                 e2m1 numbers times `lift_of` the dtype
    order_I      int32, which input of x lies at each place (act-order), None: each at its own
    int8_rows    many tokens are multiplied as int8
    """

    words_NBW: torch.Tensor
    scales_NBSR: torch.Tensor
    outputs: int
    inputs: int
    group: int | None
    minima: bool
    floats: bool = False
    order_I: torch.Tensor | None = None
    int8_rows: bool = False
    levels: str = "e2m1"

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.words_NBW.device

    @property
    def facts(self) -> dict[str, bool | str]:
        """What a problem says of it beside its sizes."""
        ordered = self.order_I is not None
        facts = {"minima": self.minima, "floats": self.floats, "ordered": ordered}
        return {**facts, "int8_rows": self.int8_rows, "levels": self.levels}

    @property
    def num_bytes(self) -> int:
        """In memory."""
        order = 0 if self.order_I is None else self.order_I.nbytes
        return self.words_NBW.nbytes + self.scales_NBSR.nbytes + order


def lift_of(dtype: torch.dtype) -> float:
    """See LIFT."""
    return LIFT if dtype is torch.bfloat16 else 1.0


def block_groups(group: int | None) -> int:
    """Groups of a block."""
    return BLOCK // group if group is not None else 1


def packed_bytes(
    outputs: int, inputs: int, group: int | None, *, minima: bool, dtype: torch.dtype
) -> int:
    """What `empty` takes."""
    tiles, blocks = -(-outputs // ROWS), -(-inputs // BLOCK)
    scales = (blocks if group is not None else 1) * block_groups(group) * (2 if minima else 1)
    return tiles * (blocks * ROWS * BLOCK // 2 + scales * ROWS * dtype.itemsize)


def empty(
    outputs: int,
    inputs: int,
    group: int | None,
    *,
    minima: bool,
    dtype: torch.dtype,
    device: torch.device | str,
    floats: bool = False,
) -> Int4Weight:
    """A weight to be filled by `write`."""
    assert group is None or group in GROUPS, group
    tiles, blocks = -(-outputs // ROWS), -(-inputs // BLOCK)
    numbers = 2 * block_groups(group) * (2 if minima else 1)
    return Int4Weight(
        torch.empty(tiles, blocks, ROWS * BLOCK // 8, dtype=torch.int32, device=device),
        torch.empty(
            tiles, blocks if group is not None else 1, numbers, 32, dtype=dtype, device=device
        ),
        outputs,
        inputs,
        group,
        minima,
        floats,
    )


def write(
    weight: Int4Weight,
    first: int,
    values_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    minima_OG: torch.Tensor | None,
) -> None:
    """Fills the tiles from number `first` on: integers 0 .. 15 (or e2m1 bits), scales and minima of
    any type. Only the last outputs of a weight are no multiple of 64."""
    tiles = -(-len(values_OI) // ROWS)
    blocks = weight.words_NBW.shape[1]
    rows = tiles * ROWS - len(values_OI)
    padded = F.pad(values_OI.to(torch.uint8), (0, blocks * BLOCK - weight.inputs, 0, rows))
    # tile, warp, e1, output | half block, sixteen inputs, e2, lane, e0
    bits = padded.view(tiles, 4, 2, 8, blocks * 2, 4, 2, 4, 2)
    nibbles = bits.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(tiles, -1, 4, 2)
    packed = nibbles[..., 0] | nibbles[..., 1] << 4
    words = packed.contiguous().view(torch.int32).view(tiles, blocks, -1)
    weight.words_NBW[first : first + tiles] = words
    parts = [scales_OG] if minima_OG is None else [scales_OG, minima_OG]
    weight.scales_NBSR[first : first + tiles] = _arranged(weight, parts, tiles)


def _arranged(weight: Int4Weight, parts: list[torch.Tensor], tiles: int) -> torch.Tensor:
    blocks, per_block = weight.scales_NBSR.shape[1], block_groups(weight.group)
    rows, groups = parts[0].shape
    dtype = weight.scales_NBSR.dtype
    if weight.floats:
        parts = [part.float() * lift_of(dtype) for part in parts]
    stacked = torch.stack([part.to(dtype) for part in parts])
    padded = F.pad(stacked, (0, blocks * per_block - groups, 0, tiles * ROWS - rows))
    # part, tile, warp, e1, output, block, group
    whole = padded.view(len(parts), tiles, 4, 2, 8, blocks, per_block)
    return whole.permute(1, 5, 0, 3, 6, 2, 4).reshape(tiles, blocks, -1, 32)


def dequantize(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[O, I] as x is multiplied by it: the exact values rounded to the dtype once."""
    tiles, blocks, _ = weight.words_NBW.shape
    packed = weight.words_NBW.view(torch.uint8).view(tiles, blocks * 2, 4, 8, 4, 4, 4)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).view(tiles, -1, 4, 8, 4, 4, 2, 2, 2)
    values = nibbles.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(tiles * ROWS, blocks * BLOCK)
    by_row = _by_row(weight)
    spread = by_row.repeat_interleave(values.shape[1] // by_row.shape[2], 2)
    if weight.floats:
        plain = torch.tensor(LEVELS[weight.levels], device=values.device)[values.int()]
        plain = plain * (spread[0] / lift_of(weight.scales_NBSR.dtype))
    elif weight.minima:
        plain = values.float() * spread[0] - spread[1]
    else:
        plain = (values.float() - OFFSET) * spread[0]
    plain = plain[: weight.outputs, : weight.inputs].to(dtype)
    if weight.order_I is None:
        return plain
    return torch.empty_like(plain).index_copy_(1, weight.order_I.long(), plain)


def scales_of(weight: Int4Weight) -> torch.Tensor:
    """float32 [O, G], of integers without minima."""
    groups = 1 if weight.group is None else -(-weight.inputs // weight.group)
    return _by_row(weight)[0, : weight.outputs, :groups].contiguous()


def _by_row(weight: Int4Weight) -> torch.Tensor:
    """Scales, and minima, [1 or 2, O padded, G padded]."""
    tiles, parts = len(weight.scales_NBSR), 2 if weight.minima else 1
    arranged = weight.scales_NBSR.view(tiles, -1, parts, 2, block_groups(weight.group), 4, 8)
    return arranged.permute(2, 0, 5, 3, 6, 1, 4).reshape(parts, tiles * ROWS, -1).float()
