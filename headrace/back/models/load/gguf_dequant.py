"""GGUF block formats to float32, vectorised over blocks (numpy).

Every function takes the raw blocks uint8 [N, size] and returns float32 [N, block]. Formulas: ggml,
ggml-quants.c (dequantize_row_*) and ggml-common.h (block layouts). Letters: N blocks, S sub-blocks
in a block, L elements in one. A value is `scale * q - minimum` in float32; the order of operations
is ggml's, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.back.quant import gguf_vectors as vectors
from headrace.back.quant.gguf_kept import E4M3

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

IQ4_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""The 16 levels of IQ4_NL and IQ4_XS (kvalues_iq4nl)."""
E2M1_DOUBLED: Final = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32
)
"""The levels of MXFP4 and NVFP4 (kvalues_mxfp4): twice the e2m1 numbers."""


def _half(blocks: U8, at: int) -> F32:
    """The float16 at byte `at` of each block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _bits(values: U8, shifts: tuple[int, ...], mask: int) -> U8:
    """[N, L] -> [N, len(shifts), L]: the bits at each shift, one plane after another."""
    shift = np.array(shifts, np.uint8)[None, :, None]
    return (values[:, None, :] >> shift) & np.uint8(mask)


def _nibbles(values: U8) -> U8:
    """[N, L] -> [N, 2L]: all low halves, then all high halves."""
    return _bits(values, (0, 4), 15).reshape(len(values), -1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """32 bits at byte `at`, one per element: [N, 32], as 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _f32(blocks: U8) -> F32:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: U8) -> F32:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(blocks: U8) -> F32:
    return blocks[:, 2:].view(np.int8) * _half(blocks, 0)


def _q4_0(blocks: U8) -> F32:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * _half(blocks, 0)


def _q4_1(blocks: U8) -> F32:
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (q.astype(np.float32) - 16) * _half(blocks, 0)


def _q5_1(blocks: U8) -> F32:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return q * _half(blocks, 0) + _half(blocks, 2)


def _scaled(q_NSL: npt.NDArray[np.generic], scale_NS: F32, minimum_NS: F32 | None = None) -> F32:
    values = q_NSL * scale_NS[:, :, None]
    if minimum_NS is not None:
        values = values - minimum_NS[:, :, None]
    return values.astype(np.float32, copy=False).reshape(len(values), -1)


def _two_bit_planes(bytes_: U8) -> U8:
    """64 bytes of 2-bit values -> [N, 16, 16]: two halves of 32 bytes, four planes each, 16
    elements a sub-block."""
    planes = [_bits(half, (0, 2, 4, 6), 3) for half in (bytes_[:, :32], bytes_[:, 32:])]
    return np.concatenate(planes, axis=1).reshape(len(bytes_), 16, 16)


def _q2_k(blocks: U8) -> F32:
    scales = blocks[:, :16]
    scale = _half(blocks, 80) * (scales & 15)
    minimum = _half(blocks, 82) * (scales >> 4)
    return _scaled(_two_bit_planes(blocks[:, 16:80]), scale, minimum)


def _q3_k(blocks: U8) -> F32:
    low = _nibbles(blocks[:, 96:104])
    high = _bits(blocks[:, 104:108], (0, 2, 4, 6), 3).reshape(-1, 16)
    scale = _half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    unset = 1 - _bits(blocks[:, :32], tuple(range(8)), 1).reshape(-1, 16, 16)
    q = _two_bit_planes(blocks[:, 32:96]).astype(np.int8) - (unset << 2).astype(np.int8)
    return _scaled(q, scale)


def _six_bit_scales(packed: U8) -> tuple[U8, U8]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima, each [N, 8]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scale, minimum


def _four_bit_planes(bytes_: U8) -> U8:
    """128 bytes -> [N, 8, 32]: of every 32 bytes the low halves, then the high halves."""
    return _bits(bytes_.reshape(-1, 32), (0, 4), 15).reshape(len(bytes_), 8, 32)


def _q4_k(blocks: U8) -> F32:
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    q = _four_bit_planes(blocks[:, 16:])
    return _scaled(q, _half(blocks, 0) * scale, _half(blocks, 2) * minimum)


def _q5_k(blocks: U8) -> F32:
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    q = _four_bit_planes(blocks[:, 48:]) | (_bits(blocks[:, 16:48], tuple(range(8)), 1) << 4)
    return _scaled(q, _half(blocks, 0) * scale, _half(blocks, 2) * minimum)


def _q6_k(blocks: U8) -> F32:
    low = _bits(blocks[:, :128].reshape(-1, 64), (0, 4), 15).reshape(-1, 16, 16)
    high = _bits(blocks[:, 128:192].reshape(-1, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    q = (low | (high << 4)).astype(np.int8) - np.int8(32)
    return _scaled(q, _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _iq4_nl(blocks: U8) -> F32:
    return IQ4_VALUES[_nibbles(blocks[:, 2:])] * _half(blocks, 0)


def _iq4_xs(blocks: U8) -> F32:
    low = _bits(blocks[:, 4:8], (0, 4), 15).transpose(0, 2, 1).reshape(-1, 8)
    high = _bits(blocks[:, 2:4], (0, 2, 4, 6), 3).transpose(0, 2, 1).reshape(-1, 8)
    scale = _half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    q = _bits(blocks[:, 8:].reshape(-1, 16), (0, 4), 15).reshape(-1, 8, 32)
    return _scaled(IQ4_VALUES[q], scale)


def _mxfp4(blocks: U8) -> F32:
    """e2m1 numbers with a power of two; 2^-127 is no normal number, so it is made of two."""
    power = np.ldexp(np.float32(0.5), blocks[:, :1].astype(np.int32) - 127)
    return E2M1_DOUBLED[_nibbles(blocks[:, 1:])] * power


def _nvfp4(blocks: U8) -> F32:
    """Four runs of 16 e2m1 numbers, each with an e4m3 scale; what would be its NaN counts as 0. A
    scale of the whole tensor lies in a tensor of its own (gguf_scales.py)."""
    scales = E4M3[blocks[:, :4]] * np.float32(0.5)
    values = _bits(blocks[:, 4:].reshape(-1, 8), (0, 4), 15).reshape(-1, 4, 16)
    return _scaled(E2M1_DOUBLED[values], scales)


def _of_vectors(numbers: Callable[[U8], vectors.WholeNumbers]) -> Callable[[U8], F32]:
    return lambda blocks: vectors.floats(numbers(blocks))


def _i32(blocks: U8) -> F32:
    """Tables of small whole numbers."""
    return blocks.view(np.int32).astype(np.float32)


DEQUANTIZE: Final[dict[str, Callable[[U8], F32]]] = {
    "I32": _i32,
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _of_vectors(vectors.q1_0),
    "Q2_0": _of_vectors(vectors.q2_0),
    "IQ1_S": _of_vectors(vectors.iq1_s),
    "IQ1_M": _of_vectors(vectors.iq1_m),
    "IQ2_XXS": _of_vectors(vectors.iq2_xxs),
    "IQ2_XS": _of_vectors(vectors.iq2_xs),
    "IQ2_S": _of_vectors(vectors.iq2_s),
    "IQ3_XXS": _of_vectors(vectors.iq3_xxs),
    "IQ3_S": _of_vectors(vectors.iq3_s),
    "TQ1_0": _of_vectors(vectors.tq1_0),
    "TQ2_0": _of_vectors(vectors.tq2_0),
}
