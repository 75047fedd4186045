"""Writes golden_torch.safetensors, as golden.py does: torchao, HQQ, and what later versions of
compressed-tensors write.

    pip install torchao hqq "compressed-tensors>=0.20"
    python -m tests.back.quant.formats.golden_torch
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.mxfp6 import MXFP6PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from safetensors.torch import save_file
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    PerTensor,
    quantize_,
)

FILE = Path(__file__).with_name("golden_torch.safetensors")
OUTPUTS, INPUTS = 12, 128
Case = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]
TORCHAO = {
    "ao-int8": Int8WeightOnlyConfig(version=2),
    "ao-int8-tensor": Int8WeightOnlyConfig(version=2, granularity=PerTensor()),
    "ao-int8-dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
    "ao-float8": Float8WeightOnlyConfig(version=2),
    "ao-intx-4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "ao-intx-4-zeros": IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(64), mapping_type=MappingType.ASYMMETRIC
    ),
    "ao-intx-6": Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int6, weight_granularity=PerGroup(32)
    ),
}
HQQ = {
    "hqq-4": (4, 64, 1),
    "hqq-8": (8, 32, 1),
    "hqq-3": (3, 64, 1),
    "hqq-2": (2, 32, 1),
    "hqq-1": (1, 32, 1),
    "hqq-4-axis0": (4, 64, 0),
    "hqq-3-axis0": (3, 48, 0),
    "hqq-4-row": (4, None, 1),
}


def main() -> None:
    """Writes the file."""
    torch.manual_seed(13)
    cases = {name: _torchao(config) for name, config in TORCHAO.items()}
    cases |= {name: _hqq(*arguments) for name, arguments in HQQ.items()}
    cases["mxfp6"] = _mxfp6()
    tensors, configs = {}, {}
    for case, (stored, expected, config) in cases.items():
        tensors |= {f"{case}.{name}": value for name, value in stored.items()}
        tensors[f"{case}.expected"] = expected
        configs[case] = json.dumps(config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, configs)


def _model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.module = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    model.module.weight.data *= torch.rand(OUTPUTS, 1) * 10
    return model


def _torchao(config: Any) -> Case:
    model = _model()
    quantize_(model, config)
    stored, _ = flatten_tensor_state_dict(model.state_dict())
    expected = model.module.weight.dequantize().float()
    written = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}}
    return stored, expected, written


def _hqq(bits: int, group: int | None, axis: int) -> Case:
    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    layer = HQQLinear(_model().module, config, compute_dtype=torch.float32, device="cpu")
    stored = {f"module.{name}": value for name, value in layer.state_dict().items()}
    written = {
        "quant_method": "hqq",
        "quant_config": {key: config[key] for key in ("weight_quant_params",)},
        "skip_modules": ["lm_head"],
    }
    return stored, layer.dequantize().float(), written


def _mxfp6() -> Case:
    arguments = {
        "num_bits": 6,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    weight = _model().module.weight.data
    largest = weight.unflatten(1, (-1, 32)).abs().amax(2)
    scales = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    state = {"weight": weight, "weight_scale": scales}
    stored = MXFP6PackedCompressor.compress(dict(state), scheme)
    expected = MXFP6PackedCompressor.decompress(dict(stored), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": arguments}
    written = {
        "quant_method": "compressed-tensors",
        "format": "mxfp6-pack-quantized",
        "config_groups": {"group_0": group},
    }
    return {f"module.{name}": value for name, value in stored.items()}, expected, written


if __name__ == "__main__":
    main()
