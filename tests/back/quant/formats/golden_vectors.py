"""Writes golden_vectors.safetensors, as golden.py does, with the packages of formats whose values are
vectors of codebooks.

    pip install --no-deps "aqlm==1.1.7" "vptq==0.0.5.post1"
    python -m tests.back.quant.formats.golden_vectors
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data
from safetensors.torch import save_file
from vptq.ops.quant_gemm import dequant
from vptq.utils.pack import pack_index

FILE = Path(__file__).with_name("golden_vectors.safetensors")
Case = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def main() -> None:
    """Writes the file."""
    torch.manual_seed(13)
    cases = {
        "aqlm-2x8": _aqlm(books=2, bits=8, outputs=1),
        "aqlm-1x10": _aqlm(books=1, bits=10, outputs=2),
        "vptq": _vptq(residual=0, outliers=0, books=1),
        "vptq-residual": _vptq(residual=16, outliers=8, books=2),
    }
    tensors, configs = {}, {}
    for case, (stored, expected, config) in cases.items():
        tensors |= {f"{case}.module.{name}": value for name, value in stored.items()}
        tensors[f"{case}.expected"] = expected
        configs[case] = json.dumps(config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, configs)


def _aqlm(books: int, bits: int, outputs: int) -> Case:
    codes = torch.randint(0, 1 << bits, (24 // outputs, 6, books))
    codebooks = torch.randn(books, 1 << bits, outputs, 8).half()
    scales = torch.rand(24 // outputs, 1, 1, 1).half()
    stored = {
        "codes": pack_int_data(codes.clone(), bits),
        "codebooks": codebooks,
        "scales": scales,
    }
    expected = _dequantize_weight(
        unpack_int_data(stored["codes"], bits), codebooks.float(), scales.float()
    )
    config = {
        "quant_method": "aqlm",
        "in_group_size": 8,
        "out_group_size": outputs,
        "num_codebooks": books,
        "nbits_per_codebook": bits,
        "linear_weights_not_to_quantize": ["lm_head.weight"],
    }
    return stored, expected, config


def _vptq(residual: int, outliers: int, books: int) -> Case:
    """30 outputs in vectors of 8, so that the last one is cut."""
    outputs, run, centroids = 30, 24, 64
    inputs = outliers + books * run
    index = torch.randint(0, centroids, (books, 4, run))
    rest = torch.randint(0, residual, (books, 4, run)) if residual else None
    packed = pack_index(
        index.to(torch.uint16).view(torch.int16),
        6,
        rest.to(torch.uint16).view(torch.int16) if rest is not None else None,
        4 if residual else 0,
        torch.uint16,
    )
    stored = {
        "indices": packed,
        "centroids.weight": torch.randn(books, centroids * 8).half(),
        "perm": torch.randperm(inputs).to(torch.uint16).view(torch.int16),
        "weight_scale": torch.rand(inputs).half() + 0.5,
        "weight_bias": torch.randn(inputs).half(),
    }
    if residual:
        stored["res_centroids.weight"] = torch.randn(books, residual * 8).half()
    if outliers:
        stored["outlier_centroids.weight"] = torch.randn(1, 32 * 4).half()
        stored["outlier_indices"] = torch.randint(0, 32, (1, 8, outliers)).to(torch.int16)

    def wide(name: str, *shape: int) -> torch.Tensor | None:
        return stored[name].float().view(*shape) if name in stored else None

    expected = dequant(
        indices=packed,
        centroids=wide("centroids.weight", books, centroids, 8),
        outlier_indices=stored.get("outlier_indices"),
        outlier_centroids=wide("outlier_centroids.weight", 1, -1, 4),
        res_indices=None,
        res_centroids=wide("res_centroids.weight", books, -1, 8),
        perm=stored["perm"],
        weight_scale=stored["weight_scale"].float(),
        weight_bias=stored["weight_bias"].float(),
        is_indice_packed=True,
        enable_outlier=outliers > 0,
        enable_residual=residual > 0,
        enable_perm=True,
        enable_norm=True,
        num_centroids=centroids,
        num_outlier_centroids=32,
        num_res_centroids=residual,
        padding=2,
        outlier_padding=2,
        num_codebooks=books,
        group_size=run,
        outlier_size=outliers,
        vector_len=8,
        outlier_vector_len=4,
    )
    layer = {
        "vector_lens": [4 if outliers else -1, 8],
        "num_centroids": [32 if outliers else -1, centroids],
        "num_res_centroids": [-1, residual or -1],
        "group_num": books,
        "group_size": run,
        "outlier_size": outliers,
        "in_features": inputs,
        "out_features": outputs,
        "is_indice_packed": True,
        "indices_as_float": False,
        "enable_norm": True,
        "enable_perm": True,
    }
    return stored, expected, {"quant_method": "vptq", "config_for_layers": {"module": layer}}


if __name__ == "__main__":
    main()
