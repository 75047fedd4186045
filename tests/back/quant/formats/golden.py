"""Writes golden.safetensors: small weights that public packages have quantized, and what the same
packages read back from them.

    pip install compressed-tensors bitsandbytes
    python -m tests.back.quant.formats.golden

For each case the stored tensors stand under "<case>.module.<leaf>" and the weight read back, in
the dtype that the package computes in, under "<case>.expected"; the `quantization_config` of each is
in the file's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

FILE = Path(__file__).with_name("golden.safetensors")
OUTPUTS, INPUTS = 24, 128
ARGUMENTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "packed-4": (PackedQuantizationCompressor, "pack-quantized",
                 {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "packed-4-zeros": (PackedQuantizationCompressor, "pack-quantized",
                       {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
    "packed-8": (PackedQuantizationCompressor, "pack-quantized",
                 {"num_bits": 8, "strategy": "channel"}),
    "packed-3": (PackedQuantizationCompressor, "pack-quantized",
                 {"num_bits": 3, "strategy": "group", "group_size": 64}),
    "packed-5-zeros": (PackedQuantizationCompressor, "pack-quantized",
                       {"num_bits": 5, "strategy": "channel", "symmetric": False}),
    "int8": (IntQuantizationCompressor, "int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8-channel": (FloatQuantizationCompressor, "float-quantized",
                    {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": (FloatQuantizationCompressor, "float-quantized",
                   {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "nvfp4": (NVFP4PackedCompressor, "nvfp4-pack-quantized",
              {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": (MXFP4PackedCompressor, "mxfp4-pack-quantized",
              {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
               "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}),
    "mxfp8": (MXFP8QuantizationCompressor, "mxfp8-quantized",
              {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
               "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}),
}  # fmt: skip


def main() -> None:
    """Writes the file."""
    torch.manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    for case, (compressor, format, arguments) in ARGUMENTS.items():
        stored, expected = _compressed(compressor, arguments)
        group = {"targets": ["Linear"], "weights": arguments}
        configs[case] = json.dumps(
            {
                "quant_method": "compressed-tensors",
                "format": format,
                "config_groups": {"group_0": group},
                "ignore": ["lm_head"],
            }
        )
        tensors |= {f"{case}.module.{name}": value for name, value in stored.items()}
        tensors[f"{case}.expected"] = expected
    for case, kind, nested in (("nf4", "nf4", True), ("fp4", "fp4", False)):
        weight = torch.randn(OUTPUTS, 40)
        values, state = bnb.quantize_4bit(
            weight, quant_type=kind, blocksize=64, compress_statistics=nested
        )
        tensors[f"{case}.module.weight"] = values
        for name, value in state.as_dict(packed=True).items():
            tensors[f"{case}.module.weight.{name}"] = value
        tensors[f"{case}.expected"] = bnb.dequantize_4bit(values, state).float()
        configs[case] = json.dumps(
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        )
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, configs)


def _compressed(
    compressor: Any, arguments: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weight = torch.randn(OUTPUTS, INPUTS) * torch.rand(OUTPUTS, 1)
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    if args.strategy == "tensor":
        grouped = weight.flatten()[None, None]
    elif args.strategy == "channel":
        grouped = weight[:, None]
    else:
        grouped = weight.unflatten(1, (-1, args.group_size))
    outer = None
    if args.strategy == "tensor_group":
        outer = generate_gparam(weight.min(), weight.max())
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, outer)
    if args.strategy == "tensor":
        scales, zeros = scales.flatten(), zeros.flatten()
    state = {"weight": weight, "weight_scale": scales}
    if not args.symmetric:
        state["weight_zero_point"] = zeros.to(torch.int8)
    if outer is not None:
        state["weight_global_scale"] = outer.reshape(1)
    stored = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    return stored, expected


if __name__ == "__main__":
    main()
