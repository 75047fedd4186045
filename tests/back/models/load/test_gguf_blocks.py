"""GGUF models whose quantized blocks are used as they are: logits, fused weights of mixed types,
splits, damage (QNT-15, QNT-17, QNT-19)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.back.models.load import load_model, open_source
from headrace.back.models.load.gguf import GGUFSource
from headrace.back.models.registry import build_model
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError, ConfigError
from tests.back.models.load.checkpoints import spec_of, tiny_model, write_gguf
from tests.kernels.native.blocks import random_blocks
from tests.models.paged import PagedRun, random_rows

CPU = torch.device("cpu")
NO_GROUP: Any = object()  # nothing is exchanged while loading
WIDE = {"hidden_size": 256, "intermediate_size": 256}


def gguf_spec(path: Path, **changes: Any) -> ModelSpec:
    return spec_of(path, gguf_config(read_gguf(path)), **changes)


def library(kind: str) -> Any:
    """A quantizer by the `gguf` library, for types it can write."""
    number = gguf.GGMLQuantizationType[kind]
    return lambda name, values: (gguf.quants.quantize(values, number), number)


def blocks(kinds: dict[str, str], default: str) -> Any:
    """Random blocks: each tensor of the type its name ends with in `kinds`. Scales small, so that
    logits stay sane."""

    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        kind = next((k for part, k in kinds.items() if part in name), default)
        if kind == "F32":
            return values, None
        seed = sum(name.encode())
        return random_blocks(kind, *values.shape, seed), gguf.GGMLQuantizationType[kind]

    return quantize


def run(model: Any) -> torch.Tensor:
    rows = PagedRun(model, random_rows(90, (9, 4)), block_tokens=16, dtype=torch.float32)
    return torch.cat(rows.step([(0, 9), (1, 4)]))


def dequantized(spec: ModelSpec) -> Any:
    """The same model with every block dequantized to floats."""
    from headrace.back.models.load.fill import check, fill
    from headrace.back.models.load.source import separate_experts

    model = build_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    wanted = {piece.name for param in model.weights.params for piece in param.pieces}
    source = separate_experts(open_source(spec), wanted)
    check(model.weights, source)
    fill(model.weights, source)
    model.finish_load()
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "smollm3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_logits_are_those_of_the_widened_weights(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """Up to the rounding of activations; rows of query and key come back in order (Llama,
    SmolLM3)."""
    model = tiny_model(architecture)
    spec = gguf_spec(write_gguf(tmp_path / "m.gguf", architecture, model, quantize=library(kind)))
    ours, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    exact, got = run(dequantized(spec)), run(ours)
    assert 0 < (got - exact).norm() / exact.norm() < 0.05
    plain = [p for p in ours.weights.params if p.packed_bytes == 0]
    assert all(len(p.shape) == 1 for p in plain)
    kept = next(d for d in report.decisions if d.field == "weights")
    assert kind in kept.chosen and "as the file holds them" in kept.why


def test_fused_weights_of_mixed_types_are_segments(tmp_path: Path) -> None:
    """The usual mixture of 4-bit files: values and the down projection in a finer type than the
    rest."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "ffn_gate": "IQ4_XS", "token_embd": "Q3_K",
             "output.weight": "Q6_K"}  # fmt: skip
    model = tiny_model("llama", **WIDE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, quantize=blocks(kinds, "Q4_K"))
    spec = gguf_spec(path)
    ours, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    exact, got = run(dequantized(spec)), run(ours)
    assert 0 < (got - exact).norm() / exact.norm() < 0.05
    assert {d.field for d in report.decisions} >= {
        "kernel.linear_blocks",
        "kernel.embedding_blocks",
    }
    stored = sum(t.num_bytes for t in read_gguf(path).tensors.values())
    assert report.weight_bytes < stored * 1.5  # 96 outputs are padded to 128: tiny models only


def test_a_fused_weight_with_a_plain_part_is_widened_whole(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", model, quantize=blocks({"attn_v": "F32"}, "Q4_K")
    )
    spec = gguf_spec(path)
    ours, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    exact, got = run(dequantized(spec)), run(ours)
    assert (got - exact).norm() / exact.norm() < 0.05
    kept = next(d for d in report.decisions if d.field == "weights")
    assert (
        kept.chosen == "10 Q4_K"
    )  # 2 layers of o, gate, up, down, the two tables; query and key are dequantized


def test_a_rank_takes_whole_blocks(tmp_path: Path) -> None:
    """Two ranks: each takes its rows and its blocks of inputs; together they hold the whole."""
    model = tiny_model("llama", **WIDE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, quantize=blocks({}, "Q8_0"))
    spec = gguf_spec(path)
    whole, _ = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    mesh = Mesh(tp=Axis(size=2, rank=1, group=NO_GROUP))
    half, report = load_model(spec, mesh=mesh, device=CPU, block_tokens=16)
    o = next(p for p in half.weights.params if "o_proj" in p.name)
    full = next(p for p in whole.weights.params if "o_proj" in p.name)
    assert o.packed_bytes * 2 == full.packed_bytes
    assert report.weight_bytes > 0


def test_a_split_that_cuts_a_block_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, quantize=blocks({}, "Q4_K"))
    with pytest.raises(ConfigError, match=r"o_proj\.weight: that cuts a Q4_K block of 256"):
        load_model(
            gguf_spec(path),
            mesh=Mesh(tp=Axis(size=2, rank=0, group=NO_GROUP)),
            device=CPU,
            block_tokens=16,
        )


def test_a_scale_that_is_no_number_is_refused_with_tensor_row_and_offset(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", model, quantize=library("Q8_0"))
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    at = tensor.offset + 5 * tensor.num_bytes // tensor.shape[0]
    data[at : at + 2] = b"\x00\x7c"
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match=rf"layers\.1\.mlp\.down_proj\.weight'.*NaN or Inf.*Q8_0 blocks, in row 5 .*{tensor.offset}",
    ):
        load_model(gguf_spec(path), mesh=Mesh(), device=CPU, block_tokens=16)


def test_without_native_kernels_blocks_are_widened_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace.back.models.load as loading

    monkeypatch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), quantize=library("Q8_0"))
    model, report = load_model(gguf_spec(path), mesh=Mesh(), device=CPU, block_tokens=16)
    kept = next(d for d in report.decisions if d.field == "weights")
    assert kept.chosen == "floats" and "dequantized to float32" in kept.why
    assert all(p.on_blocks is None for p in model.weights.params)


def test_the_map_gives_the_blocks_without_a_copy(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), quantize=library("Q8_0"))
    source = GGUFSource(path)
    rows = source.blocks("model.layers.0.self_attn.q_proj.weight")
    assert not rows.data.flags.owndata and rows.data.shape == (64, 68)
    assert rows.order[:3].tolist() == [0, 2, 4]
