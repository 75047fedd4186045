"""Block formats give, bit for bit, what the `gguf` library gives, on blocks of random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.base.config.gguf_types import TYPES

UNREAD = ("I32", "Q1_0", "Q2_0")
"""Types that gguf's own library does not read."""
SUPPORTED = [
    (number, kind)
    for number, kind in TYPES.items()
    if kind.name in DEQUANTIZE and kind.name not in UNREAD
]


def test_every_block_size_is_the_librarys() -> None:
    theirs = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    ours = {number: (kind.name, kind.block, kind.size) for number, kind in TYPES.items()}
    assert {number: theirs.get(number, ("Q2_0", 64, 18)) for number in ours} == ours


@pytest.mark.parametrize(
    ("number", "kind"), SUPPORTED, ids=lambda value: getattr(value, "name", "")
)
def test_widening_equals_the_library_bit_for_bit(number: int, kind: object) -> None:
    assert hasattr(kind, "size")
    size, name = TYPES[number].size, TYPES[number].name
    raw = np.random.default_rng(number).integers(0, 256, (3001, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)).astype(np.float32)
        got = DEQUANTIZE[name](raw)
    assert got.dtype == np.float32 and got.shape == (3001, TYPES[number].block)
    np.testing.assert_array_equal(got.reshape(wanted.shape), wanted)
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.5
    same = got.reshape(wanted.shape)[finite].view(np.uint32) == wanted[finite].view(np.uint32)
    assert same.all()


def test_all_asked_for_formats_are_there() -> None:
    asked = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"}
    asked |= {"Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"}
    asked |= {"Q1_0", "Q2_0"}
    asked |= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"}
    assert asked | {"I32"} == set(DEQUANTIZE)


def test_bits_and_pairs_of_bits_are_signs_and_numbers_from_minus_one() -> None:
    """ggml-quants.c, dequantize_row_q1_0 and dequantize_row_q2_0, a value at a time."""
    random = np.random.default_rng(7)
    scale = np.array([[0.25], [-3.0]], np.float16).view(np.uint8)
    one = np.concatenate((scale, random.integers(0, 256, (2, 16), dtype=np.uint8)), 1)
    two = np.concatenate((scale, random.integers(0, 256, (2, 16), dtype=np.uint8)), 1)
    for row, size in enumerate((0.25, -3.0)):
        bits = [size if one[row, 2 + i // 8] >> i % 8 & 1 else -size for i in range(128)]
        pairs = [((two[row, 2 + i // 4] >> 2 * (i % 4) & 3) - 1.0) * size for i in range(64)]
        assert DEQUANTIZE["Q1_0"](one)[row].tolist() == bits
        assert DEQUANTIZE["Q2_0"](two)[row].tolist() == pairs


def test_tables_of_whole_numbers_are_read() -> None:
    """Which gguf's own library does not read."""
    table = np.array([[3, 1 << 20, -7]], dtype="<i4")
    assert DEQUANTIZE["I32"](table.view(np.uint8)).tolist() == [[3.0, float(1 << 20), -7.0]]
