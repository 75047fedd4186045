"""GGUF's types whose numbers GPUs keep as 4-bit integers (gpu_int4.py), taken apart.

R rows, B blocks of a row, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.linear_int4.layout import OFFSET
from headrace.back.quant import gguf_vectors as vectors

FINE = "int4-asym-g16"
Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of some rows: integers 0 .. 15 or e2m1 bits, scales and minima [R, G]."""


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF: `block` inputs in `size` bytes. `unpack` takes uint8 [R, B, size]."""

    scheme: str
    block: int
    size: int
    unpack: Callable[[torch.Tensor], Unpacked]


def _halves(bytes_RBN: torch.Tensor) -> torch.Tensor:
    """Low halves of bytes, then high ones, along the last dimension."""
    return torch.cat((bytes_RBN & 15, bytes_RBN >> 4), -1)


def _float16(bytes_RBN: torch.Tensor) -> torch.Tensor:
    return bytes_RBN.contiguous().view(torch.float16).float()


def _q4_0(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, then values less 8: the first sixteen in the low halves of the bytes."""
    return _halves(blocks_RBN[..., 2:]).flatten(1), _float16(blocks_RBN[..., :2]).flatten(1), None


def _q4_1(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, what is added, then values."""
    added = _float16(blocks_RBN[..., 2:4]).flatten(1)
    return (
        _halves(blocks_RBN[..., 4:]).flatten(1),
        _float16(blocks_RBN[..., :2]).flatten(1),
        -added,
    )


def six_bits(bytes_RBN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight multipliers of scales and eight of minima, float32, of twelve bytes: the last four's
    upper bits lie beside the first four."""
    first, second, third = bytes_RBN[..., :4], bytes_RBN[..., 4:8], bytes_RBN[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1).float()
    return scales, torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1).float()


def _q4_k(blocks_RBN: torch.Tensor) -> Unpacked:
    """Two scales, eight 6-bit multipliers of each, then four times 32 bytes, of two groups of 32
    each."""
    scales, minima = six_bits(blocks_RBN[..., 4:16])
    outer = _float16(blocks_RBN[..., :4])
    values = _halves(blocks_RBN[..., 16:].unflatten(-1, (4, 32)))
    return (
        values.flatten(1),
        (scales * outer[..., :1]).flatten(1),
        (minima * outer[..., 1:]).flatten(1),
    )


def _q2_k(blocks_RBN: torch.Tensor) -> Unpacked:
    """Sixteen bytes of a multiplier of the scale and one of the minimum, of 128 inputs 32 bytes of
    two bits, a scale and a minimum."""
    small, outer = blocks_RBN[..., :16], _float16(blocks_RBN[..., 80:84])
    halves = blocks_RBN[..., 16:80].unflatten(-1, (2, 32))
    values = torch.cat([halves >> at & 3 for at in range(0, 8, 2)], -1)
    return (
        values.flatten(1),
        ((small & 15).float() * outer[..., :1]).flatten(1),
        ((small >> 4).float() * outer[..., 1:]).flatten(1),
    )


def _narrow(
    numbers: Callable[[vectors.U8], vectors.WholeNumbers], scales_of: int = 1
) -> Callable[[torch.Tensor], Unpacked]:
    """Numbers of 1 and 2 bits; the scale of a block stands there `scales_of` times (for 256 values
    twice for 128)."""

    def unpack(blocks_RBN: torch.Tensor) -> Unpacked:
        rows, device = len(blocks_RBN), blocks_RBN.device
        whole = numbers(np.ascontiguousarray(blocks_RBN.flatten(0, 1).cpu().numpy()))
        values, scales = (torch.from_numpy(one).to(device).view(rows, -1) for one in whole)
        return (values + OFFSET).to(torch.uint8), scales.repeat_interleave(scales_of, 1), None

    return unpack


BLOCK_TYPES = {
    "Q2_K": BlockType(FINE, 256, 84, _q2_k),
    "Q4_0": BlockType("int4", 32, 18, _q4_0),
    "Q4_1": BlockType("int4-asym", 32, 20, _q4_1),
    "Q4_K": BlockType("int4-asym", 256, 144, _q4_k),
    "TQ1_0": BlockType("int4-g128", 256, 54, _narrow(vectors.tq1_0, 2)),
    "TQ2_0": BlockType("int4-g128", 256, 66, _narrow(vectors.tq2_0, 2)),
    "Q1_0": BlockType("int4-g128", 128, 18, _narrow(vectors.q1_0)),
    "Q2_0": BlockType("int4-g64", 64, 18, _narrow(vectors.q2_0)),
}
"""Types of GGUF that are kept, by name. Source: ggml-quants.c of llama.cpp, b4000."""
