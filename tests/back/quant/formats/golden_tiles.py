"""Writes golden_tiles.safetensors, as golden.py does, with packages that no longer change: layouts of
kernels (AutoAWQ, compressed-tensors) and codebooks (AQLM, VPTQ).

    pip install --no-deps "compressed-tensors==0.9.4" "autoawq==0.2.9" aqlm vptq
    python -m tests.back.quant.formats.golden_tiles
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from awq.modules.linear.gemv import WQLinear_GEMV
from awq.modules.linear.gemv_fast import WQLinear_GEMVFast
from awq.modules.linear.marlin import WQLinear_Marlin
from compressed_tensors.compressors.sparse_quantized_compressors.marlin_24 import (
    compress_weight_24,
    pack_scales_24,
    pack_weight_24,
)
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import save_file

FILE = Path(__file__).with_name("golden_tiles.safetensors")
OUTPUTS, INPUTS = 64, 128
Case = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def main() -> None:
    """Writes the file."""
    torch.manual_seed(12)
    cases = {
        "awq-gemv": _awq(WQLinear_GEMV, "gemv", 32),
        "awq-gemv-fast": _awq(WQLinear_GEMVFast, "gemv_fast", 64),
        "awq-marlin": _awq_marlin(32),
        "awq-marlin-whole": _awq_marlin(-1),
        "marlin-24": _marlin_24(4, 32),
        "marlin-24-8": _marlin_24(8, None),
    }
    tensors, configs = {}, {}
    for case, (stored, expected, config) in cases.items():
        tensors |= {f"{case}.module.{name}": value for name, value in stored.items()}
        tensors[f"{case}.expected"] = expected.half()
        configs[case] = json.dumps(config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, configs)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def _integers(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zero points [O, G], and the weight [O, I] that they and integers stand for."""
    outputs = 16
    scales = (torch.rand(outputs, INPUTS // size) / 50 + 0.01).half()
    zeros = torch.randint(0, 16, scales.shape)
    values = torch.randint(0, 16, (outputs, INPUTS))
    shifted = values - zeros.repeat_interleave(size, 1)
    return scales, zeros, shifted * scales.float().repeat_interleave(size, 1)


def _awq(kind: Any, version: str, size: int) -> Case:
    scales, zeros, weight = _integers(size)
    packed = kind.from_linear(_linear(weight), 4, size, scales=scales.float(), zeros=zeros.float())
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": version}
    stored = dict(packed.state_dict())
    if version == "gemv_fast":  # what it adds is rounded
        values = weight / scales.float().repeat_interleave(size, 1)
        values = values.round() + zeros.repeat_interleave(size, 1)
        added = -(scales * zeros).half().float().repeat_interleave(size, 1)
        weight = values * scales.float().repeat_interleave(size, 1) + added
    return stored, weight, config


def _awq_marlin(size: int) -> Case:
    group = INPUTS if size == -1 else size
    scales = (torch.rand(OUTPUTS, INPUTS // group) / 50 + 0.01).half()
    values = torch.randint(-8, 8, (OUTPUTS, INPUTS))
    weight = values * scales.float().repeat_interleave(group, 1)
    packed = WQLinear_Marlin.from_linear(_linear(weight), 4, group, scales=scales.float())
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "marlin"}
    return dict(packed.state_dict()), weight, config


def _marlin_24(bits: int, size: int | None) -> Case:
    half = 1 << (bits - 1)
    values = torch.randint(-half, half, (OUTPUTS, INPUTS // 4, 4))
    values[values == 0] = 1
    order = torch.rand(values.shape).argsort(2)
    values[order < 2] = 0
    values = values.flatten(1)
    group = size or INPUTS
    scales = (torch.rand(OUTPUTS, INPUTS // group) / 50 + 0.01).half()
    weight = values * scales.float().repeat_interleave(group, 1)
    strategy = "group" if size else "channel"
    arguments = QuantizationArgs(num_bits=bits, strategy=strategy, group_size=size)
    kept, meta = compress_weight_24(values.half())
    kept = kept.t().contiguous()
    stored = {
        "weight_packed": pack_weight_24(kept + half, arguments),
        "scale_packed": pack_scales_24(scales.t().contiguous(), arguments, kept.shape),
        "meta": meta.resize_(meta.shape[1] // 2, meta.shape[0] * 2),
    }
    weights = {"num_bits": bits, "strategy": strategy, "group_size": size, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return stored, weight, config


if __name__ == "__main__":
    main()
