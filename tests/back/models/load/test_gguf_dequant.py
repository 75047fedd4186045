"""Block formats give, bit for bit, what the `gguf` library gives, on blocks of random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.base.config.gguf_types import TYPES

SUPPORTED = [
    (number, kind)
    for number, kind in TYPES.items()
    if kind.name in DEQUANTIZE and kind.name != "I32"
]


def test_every_block_size_is_the_librarys() -> None:
    theirs = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    ours = {number: (kind.name, kind.block, kind.size) for number, kind in TYPES.items()}
    assert {number: theirs[number] for number in ours} == ours


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
    asked |= {"Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
    asked |= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"}
    assert asked | {"I32"} == set(DEQUANTIZE)


def test_tables_of_whole_numbers_are_read() -> None:
    """Which gguf's own library does not read."""
    table = np.array([[3, 1 << 20, -7]], dtype="<i4")
    assert DEQUANTIZE["I32"](table.view(np.uint8)).tolist() == [[3.0, float(1 << 20), -7.0]]
