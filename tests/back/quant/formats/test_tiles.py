"""Layouts of tensor cores equal what is packed here, value by value, from the places that a warp's
threads have in a product of tiles (PTX ISA, fragments of mma.m16n8k16). QNT-01 QNT-05 QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import golden, open_weight
from tests.back.quant.formats.test_formats import assert_rectangles


def fragment(thread: int) -> list[tuple[int, int]]:
    """(input, output) of the four values of B that a thread has in a tile of 16 inputs x 8."""
    first = 2 * (thread % 4)
    return [(first + at, thread // 4) for at in (0, 1, 8, 9)]


def word_of(values: list[int]) -> int:
    """Eight values of 4 bits, the even ones first."""
    return sum(value << 4 * i for i, value in enumerate(values[::2] + values[1::2]))


def signed(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def integers(outputs: int, inputs: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator)
    return values, (torch.rand(outputs, groups, generator=generator) + 0.1).half()


def marlin_words(values_OI: torch.Tensor) -> torch.Tensor:
    """A word for each thread and tile of a strip of four tiles: two fragments, side by side."""
    outputs, inputs = values_OI.shape
    rows = []
    for tile in range(0, inputs, 16):
        row = []
        for strip in range(0, outputs, 64):
            for thread in range(32):
                for first in range(strip, strip + 64, 16):
                    places = [
                        (tile + i, first + half + o) for half in (0, 8) for i, o in fragment(thread)
                    ]
                    row.append(word_of([int(values_OI[o, i]) for i, o in places]))
        rows.append(row)
    return signed(rows)


def marlin_scales(scales_GO: torch.Tensor) -> torch.Tensor:
    """Each thread finds the eight outputs of its column, one of each fragment, side by side."""
    stored = scales_GO.clone()
    for first in range(0, scales_GO.shape[1], 64):
        order = [first + column + 8 * block for column in range(8) for block in range(8)]
        stored[:, first : first + 64] = scales_GO[:, order]
    return stored


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": True}


def marlin(outputs: int, inputs: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, scales = integers(outputs, inputs, inputs // 32)
    stored = {"module.B": marlin_words(values), "module.s": marlin_scales(scales.t().contiguous())}
    return stored, (values - 8) * scales.float().repeat_interleave(32, 1)


def test_marlin_of_gptq_keeps_its_numbers(tmp_path: Path) -> None:
    stored, weight = marlin(128, 64)
    with closing(open_weight(tmp_path, GPTQ, stored)) as source:
        assert source.entries["module.weight"].scheme == "int4"
        assert_rectangles(source, "module.weight", weight)


def test_tiles_of_tinygemm(tmp_path: Path) -> None:
    """Four words of a thread hold its outputs of two tiles of 16 inputs each."""
    values, scales = integers(16, 256, 4)
    added = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    words = [
        [
            [
                [
                    word_of([
                        int(values[eight + o, span + 32 * pair + 16 * tile + i])
                        for tile in (0, 1)
                        for i, o in fragment(thread)
                    ])
                    for pair in range(4)
                ]
                for thread in range(32)
            ]
            for span in range(0, 256, 128)
        ]
        for eight in range(0, 16, 8)
    ]  # fmt: skip
    pairs = torch.stack((scales.bfloat16(), added), 2).transpose(0, 1)
    stored = {"module._weight_qdata": torch.tensor(words, dtype=torch.int64).to(torch.int32)}
    stored["module._weight_scale_and_zero"] = pairs
    data = {"group_size": 64, "int4_packing_format": "tile_packed_to_4d"}
    default = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}
    config = {"quant_method": "torchao", "quant_type": {"default": default}}
    wide, bias = (part.float().repeat_interleave(64, 1) for part in (scales.bfloat16(), added))
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == "int4-asym-g64"
        assert_rectangles(source, "module.weight", (values - 8) * wide + bias)
    stored["module._weight_qdata"] = stored["module._weight_qdata"][:, :, :16]
    with pytest.raises(CheckpointError, match="32 and 1, 2 or 4"):
        open_weight(tmp_path, config, stored)


def test_eetq_is_int8_in_another_order(tmp_path: Path) -> None:
    outputs, inputs = 64, 128
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator)
    scales = (torch.rand(outputs, generator=generator) + 0.1).half()
    stored = []
    for pair in range(0, outputs, 2):
        for span in range(0, inputs, 64):
            for output in (pair, pair + 1):
                for sixteen in range(span, span + 64, 16):
                    places = [first + at for first in (0, 2, 4, 6) for at in (0, 1, 8, 9)]
                    for four in range(0, 16, 4):
                        a, b, c, d = (
                            int(values[output, sixteen + i]) for i in places[four : four + 4]
                        )
                        stored += [a, c, b, d]
    weight = (torch.tensor(stored) + 128).to(torch.uint8).view(torch.int8).view(inputs, outputs)
    tensors = {"module.weight": weight, "module.weight_scales": scales}
    config = {"quant_method": "eetq", "weights": "int8"}
    with closing(open_weight(tmp_path, config, tensors)) as source:
        assert source.entries["module.weight"].scheme == "int8"
        assert_rectangles(source, "module.weight", values * scales.float()[:, None])


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        ("awq-gemv", "int4-asym"),
        ("awq-gemv-fast", "int4-asym-g64"),
        ("awq-marlin", "int4"),
        ("marlin-24", "int4"),
        ("marlin-24-8", "int8"),
    ],
)
def test_kernels_that_read_integers_read_those_of_other_layouts(
    case: str, scheme: str, tmp_path: Path
) -> None:
    config, stored, expected = golden(case)
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == scheme
        groups, numbers = source.groups("module.weight", (slice(0, 16), slice(0, 64)))
        assert groups.values_RC.dtype in (torch.int16, torch.int8) and numbers.bits in (4, 8)
        torch.testing.assert_close(
            groups.dequantized(), expected[:16, :64].float(), rtol=0.002, atol=0
        )


def test_a_strip_that_is_cut_is_refused(tmp_path: Path) -> None:
    stored, _ = marlin(64, 32)
    stored["module.B"] = stored["module.B"][:, :96]
    with pytest.raises(CheckpointError, match=r"module\.B has the shape \[2, 96\].*64 outputs"):
        open_weight(tmp_path, GPTQ, stored)
    stored, _ = marlin(64, 32)
    stored["module.s"] = stored["module.s"][:, :32]
    with pytest.raises(CheckpointError, match=r"module\.s has the shape \[1, 32\], not \[1, 64\]"):
        open_weight(tmp_path, GPTQ, stored)
