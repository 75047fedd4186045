"""Floats of 6 bits as Quark packs them, and bytes that bitsandbytes stores as floats of several. QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import golden, open_weight
from tests.back.quant.formats.test_formats import assert_rectangles


def number(bits: int, exponent_bits: int) -> float:
    """A sign, an exponent and a mantissa (Open Compute, Microscaling Formats 1.0, 5.3.2)."""
    mantissa_bits = 5 - exponent_bits
    sign, rest = -1.0 if bits >> 5 else 1.0, bits & 31
    exponent, mantissa = divmod(rest, 1 << mantissa_bits)
    bias = (1 << exponent_bits - 1) - 1
    part = mantissa / (1 << mantissa_bits)
    return sign * (
        part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias)
    )


@pytest.mark.parametrize("kind", ["e2m3", "e3m2"])
def test_quark_packs_four_numbers_of_6_bits_into_three_bytes(kind: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(0, 64, (8, 128), generator=generator)
    powers = torch.randint(120, 134, (8, 4), generator=generator)
    words = bits.view(8, -1, 4) @ torch.tensor([1, 1 << 6, 1 << 12, 1 << 18])
    packed = torch.stack([words >> shift & 255 for shift in (0, 8, 16)], -1).flatten(1)
    stored = {
        "module.weight": packed.to(torch.uint8),
        "module.weight_scale": powers.to(torch.uint8),
    }
    weights = {
        "dtype": f"fp6_{kind}",
        "qscheme": "per_group",
        "group_size": 32,
        "scale_format": "e8m0",
    }
    inputs = {**weights, "is_dynamic": True}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weights, "input_tensors": inputs},
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }
    exponent_bits = int(kind[1])
    table = torch.tensor([number(one, exponent_bits) for one in range(64)])
    weight = table[bits] * (2.0 ** (powers - 127)).repeat_interleave(32, 1)
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_bitsandbytes_in_floats_of_several_bytes(storage: torch.dtype, tmp_path: Path) -> None:
    """As training on several GPUs wants them; plain weights of that type stay plain."""
    config, stored, weight = golden("nf4")
    packed = stored["module.weight"].flatten()
    stored["module.weight"] = packed.view(storage)[:, None]
    stored["norm.weight"] = torch.ones(8, dtype=storage)
    config = config | {"bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert sorted(source.entries) == ["module.weight", "norm.weight"]
        assert_rectangles(source, "module.weight", weight)
    with pytest.raises(CheckpointError, match="bnb_4bit_quant_storage"):
        open_weight(tmp_path, config | {"bnb_4bit_quant_storage": "int8"}, stored)
