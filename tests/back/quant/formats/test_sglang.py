"""What SGLang's methods name equals what is decoded here number by number. QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import open_weight
from tests.back.quant.formats.test_formats import assert_rectangles


def blocks(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of blocks, and what the values stand for."""
    outputs, inputs = values.shape
    scales = torch.rand(-(-outputs // size), -(-inputs // size)) + 0.5
    wide = scales.repeat_interleave(size, 0)[:outputs].repeat_interleave(size, 1)[:, :inputs]
    return scales, values.float() * wide


@pytest.mark.parametrize(("size", "scheme"), [(128, "int8-g128"), (64, "")])
def test_int8_in_blocks(size: int, scheme: str, tmp_path: Path) -> None:
    values = torch.randint(-127, 128, (140, 256), dtype=torch.int8)
    scales, weight = blocks(values, size)
    stored = {"module.weight": values, "module.weight_scale_inv": scales}
    config = {"quant_method": "blockwise_int8", "weight_block_size": [size, size]}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme.partition("+")[0] == scheme
        assert_rectangles(source, "module.weight", weight)


@pytest.mark.parametrize(("kind", "scheme"), [("int8", "int8"), ("fp8", "fp8")])
def test_a_byte_with_a_scale_for_each_output(kind: str, scheme: str, tmp_path: Path) -> None:
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    values = torch.randint(-127, 128, (24, 64)).to(dtype)
    scales = torch.rand(24, 1)
    stored = {"module.weight": values, "module.weight_scale": scales}
    with closing(open_weight(tmp_path, {"quant_method": f"w8a8_{kind}"}, stored)) as source:
        assert source.entries["module.weight"].scheme.partition("+")[0] == scheme
        assert_rectangles(source, "module.weight", values.float() * scales)


def test_experts_of_4_bits_stand_beside_blocks_of_e4m3(tmp_path: Path) -> None:
    values = torch.randint(-8, 8, (24, 256))
    scales = torch.rand(24, 2)
    expert = "model.layers.3.mlp.experts.1.up_proj"
    dense = torch.randn(130, 128).to(torch.float8_e4m3fn)
    dense_scales, dense_weight = blocks(dense, 128)
    stored = {
        f"{expert}.weight": ((values[:, 1::2] << 4) | (values[:, ::2] & 15)).to(torch.int8),
        f"{expert}.weight_scale_inv": scales,
        f"{expert}.input_scale": torch.tensor([0.25]),
        "module.weight": dense,
        "module.weight_scale_inv": dense_scales,
    }
    config = {"quant_method": "w4afp8", "moe_activation_scheme": "static"}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries[f"{expert}.weight"].scheme.startswith("int4-g128")
        assert_rectangles(source, f"{expert}.weight", values * scales.repeat_interleave(128, 1))
        assert_rectangles(source, "module.weight", dense_weight)
    del stored[f"{expert}.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale_inv is missing"):
        open_weight(tmp_path, config, stored)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "blockwise_int8", "weight_block_size": [0, 128]}, "two positive sizes"),
        ({"quant_method": "blockwise_int8", "activation_scheme": "static"}, "dynamic"),
        ({"quant_method": "w4afp8", "moe_activation_scheme": "dynamic"}, "static"),
        ({"quant_method": "qoq"}, "quant_method is 'qoq'"),
    ],
)
def test_other_values_are_refused_by_key(config: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        stored_quantization({"quantization_config": config}, "config.json")
