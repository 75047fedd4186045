"""Matrices of GGUF files that are multiplied with numbers in tensors of their own. QNT-03."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.back.models.load.gguf import GGUFSource, deinterleaved
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import tiny_model, write_gguf
from tests.back.models.load.test_gguf import gguf_spec, loaded

NVFP4 = gguf.GGMLQuantizationType.NVFP4
DOWN = "model.layers.1.mlp.down_proj.weight"


def written(
    path: Path, architecture: str, matrix: str, scale: np.ndarray, **sizes: Any
) -> tuple[Path, np.ndarray]:
    """A file with one matrix in NVFP4, random, and what its numbers stand for without `scale`."""
    wanted: list[np.ndarray] = []

    def quantize(stored: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        if stored != f"{matrix}.weight":
            return values, None
        shape = (len(values), values.shape[1] // 64 * 36)
        raw = np.random.default_rng(1).integers(0, 100, shape, dtype=np.uint8)
        wanted.append(gguf.quants.dequantize(raw, NVFP4).reshape(values.shape))
        return raw, NVFP4

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(f"{matrix}.scale", scale)
        writer.add_tensor(f"{matrix}.input_scale", np.ones(1, np.float32))

    model = tiny_model(architecture, **sizes)
    write_gguf(path, architecture, model, quantize=quantize, extra=extra)
    return path, wanted[0]


def test_a_matrix_is_multiplied_with_its_own_scale(tmp_path: Path) -> None:
    scale = np.array([0.37], np.float32)
    path, wanted = written(
        tmp_path / "m.gguf", "qwen2", "blk.1.ffn_down", scale, intermediate_size=128
    )
    got = loaded(gguf_spec(path))[DOWN]
    np.testing.assert_array_equal(got.numpy(), wanted * scale)


def test_rows_that_are_put_in_order_are_multiplied_too(tmp_path: Path) -> None:
    scale = np.array([2.5], np.float32)
    path, wanted = written(tmp_path / "m.gguf", "llama", "blk.0.attn_q", scale, hidden_size=64)
    got = torch.empty(wanted.shape)
    rows, columns = (slice(0, size) for size in wanted.shape)
    GGUFSource(path).copy(
        "model.layers.0.self_attn.q_proj.weight", wanted.shape, (rows, columns), got
    )
    heads = tiny_model("llama").config.num_attention_heads
    np.testing.assert_array_equal(got.numpy(), deinterleaved(wanted * scale, heads))


def test_each_expert_has_a_scale_of_its_own(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "hidden_size": 64}
    scale = np.array([1.0, 0.5, -3.0, 0.125], np.float32)
    path, wanted = written(tmp_path / "m.gguf", "qwen3moe", "blk.0.ffn_down_exps", scale, **sizes)
    source = GGUFSource(path)
    name = next(n for n in source.entries if n.startswith("model.layers.0.") and "down_proj" in n)
    shape = source.entries[name].shape
    got = torch.empty(2, *shape[1:])
    source.copy(name, shape, (slice(2, 4), slice(0, shape[1]), slice(0, shape[2])), got)
    each = wanted.reshape(shape)[2:] * scale[2:, None, None]
    np.testing.assert_array_equal(got.numpy(), each)


@pytest.mark.parametrize("scale", [np.ones(2, np.float32), np.array([np.inf], np.float32)])
def test_other_numbers_of_scales_are_refused_by_name(scale: np.ndarray, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "m.gguf", "qwen2", "blk.1.ffn_down", scale, intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.scale .* one number, finite"):
        GGUFSource(path)
