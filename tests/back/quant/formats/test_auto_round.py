"""What AutoRound writes besides GPTQ's and AWQ's integers equals what is decoded here number by number. QNT-17."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored, open_weight
from tests.back.quant.formats.test_formats import assert_rectangles


def auto_round_stored(kind: str) -> tuple[Stored, dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    outputs, inputs = 12, 128
    group = {"mx_fp4": 32, "mx_fp8": 32, "mx_int": 32, "nv_fp": 16, "nvfp4_v2": 16}.get(
        kind, inputs
    )
    bits = 4 if kind in ("mx_fp4", "mx_int", "nv_fp", "nvfp4_v2") else 8
    config = {
        "quant_method": "auto-round",
        "bits": bits,
        "group_size": group,
        "data_type": kind,
        "sym": True,
    }
    if bits == 4:
        values = torch.randint(0, 16, (outputs, inputs), generator=generator)
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        if kind == "mx_int":
            levels = torch.arange(8) / 4
        numbers = levels[values & 7] * (1 - 2 * (values >> 3))
        stored = {"module.weight_packed": (values[:, 1::2] << 4 | values[:, ::2]).to(torch.uint8)}
    else:
        dtype = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
        numbers = torch.randn(outputs, inputs, generator=generator)
        stored = {"module.weight": numbers.to(dtype)}
        numbers = stored["module.weight"].float()
    if kind.startswith("mx"):
        powers = torch.randint(120, 132, (outputs, inputs // group), generator=generator)
        stored["module.weight_scale"] = powers.to(torch.uint8)
        scales = 2.0 ** (powers - 127)
    elif kind == "nv_fp":
        scales = torch.randint(1, 9, (outputs, inputs // group), generator=generator).float()
        stored["module.weight_scale"] = scales.to(torch.float8_e4m3fn)
        stored["module.weight_global_scale"] = torch.tensor([320.0])
        stored["module.input_global_scale"] = torch.tensor([64.0])
        scales = scales / 320
    elif kind == "nvfp4_v2":
        codes = torch.randint(0, 200, (outputs, inputs // group), generator=generator)
        stored["module.weight_scale"] = codes.to(torch.uint8)
        each = [
            (code % 8 / 8 + (code >= 8)) * 2.0 ** (max(code // 8, 1) - 15)
            for code in codes.flatten().tolist()
        ]
        scales = torch.tensor(each).view(codes.shape)
    elif kind == "blocks":
        blocks = torch.rand(2, 2, generator=generator)
        stored["module.weight_scale_inv"] = blocks
        config |= {"data_type": "fp8", "group_size": [8, 64]}
        return (
            stored,
            config,
            numbers * blocks.repeat_interleave(8, 0)[:12].repeat_interleave(64, 1),
        )
    else:
        stored["module.weight_scale"] = torch.rand(outputs, generator=generator).bfloat16()
        stored["module.input_scale"] = torch.tensor([0.5], dtype=torch.bfloat16)
        scales = stored["module.weight_scale"].float()[:, None]
        config |= {"group_size": -1, "act_bits": 8, "act_dynamic": False}
    return stored, config, numbers * scales.repeat_interleave(group, 1)


@pytest.mark.parametrize(
    "kind", ["mx_fp4", "mx_fp8", "mx_int", "nv_fp", "nvfp4_v2", "fp8", "fp8_e5m2", "blocks"]
)
def test_floats_of_auto_round(kind: str, tmp_path: Path) -> None:
    stored, config, weight = auto_round_stored(kind)
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert list(source.entries) == ["module.weight"]
        assert_rectangles(source, "module.weight", weight)
    name = next(name for name in stored if "weight_scale" in name)
    del stored[name]
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is missing"):
        open_weight(tmp_path, config, stored)


def test_rotated_activations_of_auto_round_are_refused() -> None:
    _, config, _ = auto_round_stored("mx_fp4")
    whole = {"quantization_config": config | {"rotation_config": {"hadamard_type": "hadamard"}}}
    with pytest.raises(CheckpointError, match=r"rotation_config .* absent"):
        stored_quantization(whole, "config.json")
