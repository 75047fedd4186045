"""Writes golden_mlx.safetensors, as golden.py does: what MLX packs, and reads back.

pip install "mlx[cpu]==0.32.4" numpy torch safetensors
python -m tests.back.quant.formats.golden_mlx
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_name("golden_mlx.safetensors")
OUTPUTS, INPUTS = 12, 128
CASES: dict[str, dict[str, Any]] = {
    **{f"mlx-{bits}": {"group_size": 64, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "mlx-4-g32": {"group_size": 32, "bits": 4},
    "mlx-mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mlx-nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mlx-mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
ROLES = ("weight", "scales", "biases")


def main() -> None:
    """Writes the file."""
    rng = np.random.default_rng(13)
    tensors, configs = {}, {}
    for case, config in CASES.items():
        weight = rng.standard_normal((OUTPUTS, INPUTS)) * rng.uniform(0, 10, (OUTPUTS, 1))
        weight[3, :64] = 0.75  # a group of one value
        weight[4] = 0
        stored = mx.quantize(mx.array(weight.astype(np.float32)), **config)
        back = mx.dequantize(*stored, **config, dtype=mx.float32)
        for role, one in zip(ROLES, stored, strict=False):
            tensors[f"{case}.module.{role}"] = torch.from_numpy(np.array(one))
        tensors[f"{case}.expected"] = torch.from_numpy(np.array(back))
        configs[case] = json.dumps({"quant_method": "mlx", **config})
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, configs)


if __name__ == "__main__":
    main()
