"""Writes golden_sparse.safetensors, as golden.py does, with the last compressed-tensors that writes
sparse weights.

    pip install "compressed-tensors<0.12"
    python -m tests.back.quant.formats.golden_sparse
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BitmaskCompressor, Sparse24BitMaskCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from safetensors.torch import save_file

FILE = Path(__file__).with_name("golden_sparse.safetensors")
OUTPUTS, INPUTS = 12, 128
Case = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def main() -> None:
    """Writes the file."""
    torch.manual_seed(11)
    half = Sparse24BitMaskCompressor(config=Sparse24BitMaskConfig())
    any_pattern = BitmaskCompressor(config=BitmaskConfig())
    cases = {
        "sparse-24": _plain(half, "sparse-24-bitmask"),
        "sparse": _plain(any_pattern, "sparse-bitmask"),
        "sparse-24-fp8": _fp8(half, "sparse-24-bitmask"),
        "sparse-fp8": _fp8(any_pattern, "sparse-bitmask"),
    }
    tensors, configs = {}, {}
    for case, (stored, expected, config) in cases.items():
        tensors |= {f"{case}.{name}": value for name, value in stored.items()}
        tensors[f"{case}.expected"] = expected
        configs[case] = json.dumps({"quant_method": "compressed-tensors", **config})
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, configs)


def _weight() -> torch.Tensor:
    weight = torch.randn(OUTPUTS, INPUTS // 4, 4)
    weight[weight.abs() < weight.abs().kthvalue(3, dim=2, keepdim=True).values] = 0
    return weight.flatten(1)


def _plain(compressor: Any, format: str) -> Case:
    stored = compressor.compress_weight("module", _weight().bfloat16())
    parts = {name.removeprefix("module."): value for name, value in stored.items()}
    expected = compressor.decompress_weight(parts)
    return stored, expected, {"sparsity_config": {"format": format, "targets": ["Linear"]}}


def _fp8(compressor: Any, format: str) -> Case:
    weight = _weight()
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    stored = compressor.compress_weight("module", values)
    parts = {name.removeprefix("module."): value for name, value in stored.items()}
    expected = compressor.decompress_weight(parts).float() * scales
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config = {
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "sparsity_config": {"format": format, "targets": ["Linear"]},
    }
    return {**stored, "module.weight_scale": scales}, expected, config


if __name__ == "__main__":
    main()
