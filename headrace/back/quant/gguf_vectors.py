"""GGUF's IQ types and those of 1 and 2 bits as whole numbers, with scales of 16, 32 or all values
of a block: vectors of a grid, and signs.

Blocks are uint8 [N, bytes], 256 values each but those of Q1_0 (128) and Q2_0 (64); layouts:
github.com/ggml-org/ggml, ggml-common.h. What is returned: int8 [N, values] and float32 [N, G].
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.back.quant.gguf_grids import grid

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]
WholeNumbers = tuple[I8, F32]
_EIGHTHS: Final = np.float32(0.125)
"""IQ1's numbers are -1, 0, 1 and an eighth more or less: whole in eighths."""


def floats(numbers: WholeNumbers) -> F32:
    """float32 [N, values]."""
    values, scales = numbers
    grouped = values.reshape(len(values), scales.shape[1], -1).astype(np.float32)
    return (scales[..., None] * grouped).reshape(len(values), -1)


def iq2_xxs(blocks: U8) -> WholeNumbers:
    """Per 32 values 4 indices of a byte, then 4 signs of 7 bits and a scale of 4."""
    words = blocks[:, 2:].copy().view("<u4").reshape(-1, 8, 2)
    indices = words[..., :1].copy().view(np.uint8)
    scale = _half(blocks) * (_wide(words[..., 1] >> 28) + np.float32(0.5)) * np.float32(0.25)
    return _signed("IQ2_XXS", indices, _seven_bits(words[..., 1]), scale[..., None])


def iq2_xs(blocks: U8) -> WholeNumbers:
    """Per 8 values 9 bits of an index and 7 of signs; a scale of 4 bits per 16."""
    words = blocks[:, 2:66].copy().view("<u2").reshape(-1, 8, 4)
    scale = _half(blocks)[..., None] * (_scales16(blocks[:, 66:]) + np.float32(0.5))
    return _signed("IQ2_XS", words & 511, _parity(words >> 9), scale * np.float32(0.25))


def iq2_s(blocks: U8) -> WholeNumbers:
    """Per 8 values 10 bits of an index, the upper 2 apart, and 8 signs; 4 bits of scale per 16."""
    low = blocks[:, 2:34].reshape(-1, 8, 4).astype(np.uint16)
    high = _fields(blocks[:, 66:74], (0, 2, 4, 6), 3).astype(np.uint16)
    scale = _half(blocks)[..., None] * (_scales16(blocks[:, 74:]) + np.float32(0.5))
    signs = blocks[:, 34:66].reshape(-1, 8, 4)
    return _signed("IQ2_S", low | high << 8, signs, scale * np.float32(0.25))


def iq3_xxs(blocks: U8) -> WholeNumbers:
    """Per 32 values 8 indices of a byte; then per 32 4 signs of 7 bits and a scale of 4."""
    indices = blocks[:, 2:66].reshape(-1, 8, 8)
    words = blocks[:, 66:].copy().view("<u4")
    scale = _half(blocks) * (_wide(words >> 28) + np.float32(0.5)) * np.float32(0.5)
    return _signed("IQ3_XXS", indices, _seven_bits(words), scale[..., None])


def iq3_s(blocks: U8) -> WholeNumbers:
    """Per 4 values 9 bits of an index, the uppermost apart; 8 signs per 8, a scale of 4 bits per
    32."""
    low = blocks[:, 2:66].reshape(-1, 8, 8).astype(np.uint16)
    high = _fields(blocks[:, 66:74], tuple(range(8)), 1).astype(np.uint16)
    scale = _half(blocks) * (1 + 2 * _wide(_fields(blocks[:, 106:], (0, 4), 15).reshape(-1, 8)))
    signs = blocks[:, 74:106].reshape(-1, 8, 4)
    return _signed("IQ3_S", low | high << 8, signs, scale[..., None])


def iq1_s(blocks: U8) -> WholeNumbers:
    """Per 8 values 11 bits of an index, the upper 3 in a word of each 32 with a scale of 3 bits and
    the sign of what is added."""
    words = blocks[:, 34:].copy().view("<u2")
    low = blocks[:, 2:34].reshape(-1, 8, 4).astype(np.uint16)
    high = _fields16(words, (0, 3, 6, 9), 7)
    scale = _half(blocks) * (2 * _wide(words >> 12 & 7) + 1)
    added = np.where(words & 0x8000, -1, 1)[..., None, None]
    return _eighths(low | high << 8, added), scale * _EIGHTHS


def iq1_m(blocks: U8) -> WholeNumbers:
    """The same with a scale of 3 bits per 16 and a sign per 8; the upper 4 bits of the words of
    scales are a float16 together."""
    words = blocks[:, 48:].copy().view("<u2")
    parts = (words >> 12).astype(np.uint16) << np.array([0, 4, 8, 12], np.uint16)
    whole = parts.sum(1, dtype=np.uint16)[:, None].view(np.float16).astype(np.float32)
    scale = whole * (2 * _wide(_fields16(words, (0, 3, 6, 9), 7).reshape(-1, 16)) + 1)
    nibbles = _fields(blocks[:, 32:48], (0, 4), 15).reshape(-1, 8, 4).astype(np.uint16)
    low = blocks[:, :32].reshape(-1, 8, 4).astype(np.uint16)
    added = np.where(nibbles & 8, -1, 1)[..., None]
    return _eighths(low | (nibbles & 7) << 8, added), scale * _EIGHTHS


def tq1_0(blocks: U8) -> WholeNumbers:
    """Five digits to the base of three in a byte, the first ones highest."""
    wide = _digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)
    return np.concatenate(wide, 1).astype(np.int8) - np.int8(1), _half(blocks, 52)


def tq2_0(blocks: U8) -> WholeNumbers:
    """Two bits a value, of 32 bytes one after another."""
    halves = [_planes(blocks[:, at : at + 32]) for at in (0, 32)]
    return np.concatenate(halves, 1).astype(np.int8) - np.int8(1), _half(blocks, 64)


def q1_0(blocks: U8) -> WholeNumbers:
    """A bit a value, lowest first: 1 and -1."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.int8)
    return bits * np.int8(2) - np.int8(1), _half(blocks)


def q2_0(blocks: U8) -> WholeNumbers:
    """Two bits a value, lowest first: -1 to 2."""
    values = _fields(blocks[:, 2:], (0, 2, 4, 6), 3).reshape(len(blocks), -1)
    return values.astype(np.int8) - np.int8(1), _half(blocks)


def _signed(name: str, indices: npt.NDArray[np.integer], signs: U8, scale: F32) -> WholeNumbers:
    """indices [N, 8, 4 or 8] of vectors, signs [N, 8, 4] a bit a value, scale [N, 8, 1 or 2]."""
    vectors = grid(name).astype(np.int8)[indices].reshape(len(indices), 8, 4, 8)
    bits = np.unpackbits(signs[..., None], axis=3, bitorder="little")
    values = np.where(bits, -vectors, vectors)
    return values.reshape(len(indices), -1), scale.reshape(len(indices), -1)


def _eighths(indices: npt.NDArray[np.integer], added: npt.NDArray[np.integer]) -> I8:
    """Of vectors of IQ1's grid [N, 8, 4] and what is added to each of their values."""
    values = 8 * grid("IQ1_S")[indices].astype(np.int8) + added.astype(np.int8)
    return values.reshape(len(indices), -1)


def _half(blocks: U8, at: int = 0) -> F32:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _wide(values: npt.NDArray[np.integer]) -> F32:
    return values.astype(np.float32)


def _scales16(nibbles: U8) -> F32:
    """[N, 8, 2]."""
    return _wide(_fields(nibbles, (0, 4), 15))


def _fields(bytes_: U8, shifts: tuple[int, ...], mask: int) -> U8:
    """[N, L] -> [N, L, len(shifts)]."""
    return bytes_[..., None] >> np.array(shifts, np.uint8) & np.uint8(mask)


def _fields16(
    words: npt.NDArray[np.uint16], shifts: tuple[int, ...], mask: int
) -> npt.NDArray[np.uint16]:
    return words[..., None] >> np.array(shifts, np.uint16) & np.uint16(mask)


def _seven_bits(words: npt.NDArray[np.uint32]) -> U8:
    """The signs of four times 8 values: [N, 8] -> [N, 8, 4]."""
    return _parity(words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127))


def _parity(seven: npt.NDArray[np.integer]) -> U8:
    """An eighth bit, so that their number is even."""
    bits = seven.astype(np.uint8)
    odd = np.unpackbits(bits[..., None], axis=-1).sum(-1, dtype=np.uint8) & np.uint8(1)
    return bits | odd << np.uint8(7)


def _digits(bytes_: U8, count: int) -> F32:
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
    moved = (bytes_[:, None, :] * powers).astype(np.uint16)
    return _wide(moved * 3 >> 8).reshape(len(bytes_), -1)


def _planes(bytes_: U8) -> U8:
    planes = bytes_[:, None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    return planes.reshape(len(bytes_), -1)
