"""Quantized weights as files hold them: those that public packages wrote (golden.py), and any others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.back.models.load.quantized import QuantizedSource
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.base.config.quantization_formats import stored_quantization

Stored = dict[str, torch.Tensor]


def _golden_files() -> dict[str, Path]:
    """Case -> the file that holds it."""
    files = {}
    for path in Path(__file__).parent.glob("golden*.safetensors"):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.metadata().keys() - {"format"}, path)
    return files


GOLDEN = _golden_files()


def golden_cases() -> list[str]:
    return sorted(GOLDEN)


def golden(case: str) -> tuple[dict[str, Any], Stored, torch.Tensor]:
    with safe_open(GOLDEN[case], "pt") as file:
        config = json.loads(file.metadata()[case])
    prefix, tensors = f"{case}.", load_file(GOLDEN[case])
    stored = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}module.")
    }
    return config, stored, tensors[f"{prefix}expected"]


def open_weight(folder: Path, config: dict[str, Any], stored: Stored) -> QuantizedSource:
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors"
    )
    quantization = stored_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    return QuantizedSource(SafetensorsSource(folder), quantization)
