"""GGUF checkpoints: the same weights as from safetensors, for every architecture; flaws refused by
name (QNT-15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace.back.models.load import load_model, open_source
from headrace.back.models.load.fill import check, fill
from headrace.back.models.load.gguf import GGUFSource
from headrace.back.models.registry import build_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import (
    MODELS,
    save,
    spec_of,
    spec_of_folder,
    tiny_model,
    write_gguf,
)

CPU = torch.device("cpu")


def gguf_spec(path: Path, **changes: Any) -> ModelSpec:
    return spec_of(path, gguf_config(read_gguf(path)), **changes)


def loaded(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The parameters a model would hold, by path, before any packing."""
    model = build_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    source = open_source(spec)
    check(model.weights, source)
    fill(model.weights, source)
    found = {}
    for param in model.weights.params:
        assert param.tensor is not None
        found[param.name] = param.tensor
    return found


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_f32_gguf_gives_the_same_weights_as_safetensors(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    wanted = loaded(spec_of_folder(save(model, tmp_path / "hf")))
    got = loaded(gguf_spec(write_gguf(tmp_path / "m.gguf", architecture, model)))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Gemma's norms take the way through "plus one" in float32, which costs the last bit.
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6 if "norm" in name else 0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_weights_from_the_gguf(
    architecture: str, tmp_path: Path
) -> None:
    """An oracle for names, row order and norms that shares nothing with us."""
    model = tiny_model(architecture)
    path = write_gguf(tmp_path / "m.gguf", architecture, model)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    source = GGUFSource(path)
    for name, entry in source.entries.items():
        target = torch.empty(entry.shape)
        source.copy(name, entry.shape, tuple(slice(0, n) for n in entry.shape), target)
        torch.testing.assert_close(target, theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_gguf_config_means_the_same_model(architecture: str, tmp_path: Path) -> None:
    """Logits of a model built from the metadata equal those of one built from config.json
    (transformers runs both)."""
    model = tiny_model(architecture).eval()
    config = gguf_config(read_gguf(write_gguf(tmp_path / "m.gguf", architecture, model)))
    again = type(model)(type(model.config).from_dict(config)).eval()
    again.load_state_dict(model.state_dict())
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def quantizer(kind: gguf.GGMLQuantizationType) -> Any:
    return lambda name, values: (gguf.quants.quantize(values, kind), kind)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_are_widened_as_the_library_does(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    model = tiny_model("qwen2")
    path = write_gguf(tmp_path / "m.gguf", "qwen2", model, quantize=quantizer(kind))
    source = GGUFSource(path)
    weight = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    got = torch.empty(weight.shape)
    full = (slice(0, weight.shape[0]), slice(0, weight.shape[1]))
    source.copy("model.layers.1.mlp.down_proj.weight", weight.shape, full, got)
    np.testing.assert_array_equal(got.numpy(), wanted)


WIDENED = [
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_NL",
    "IQ4_XS",
    "IQ2_XXS",
    "IQ3_S",
    "IQ1_M",
    "TQ1_0",
    "NVFP4",
]


@pytest.mark.parametrize("name", WIDENED)
def test_k_quants_are_widened_as_the_library_does(name: str, tmp_path: Path) -> None:
    """The library writes none of these, so the blocks are random bytes with sound scales."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (64, 256 // block * size), dtype=np.uint8)

    def quantize(stored: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        return (raw, kind) if stored == "blk.1.ffn_down.weight" else (values, None)

    model = tiny_model("qwen2", intermediate_size=256)
    spec = gguf_spec(write_gguf(tmp_path / "m.gguf", "qwen2", model, quantize=quantize))
    got = loaded(spec)["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(got.numpy(), gguf.quants.dequantize(raw, kind))


def test_a_rank_gets_its_rows_and_columns(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), quantize=quantizer(kind))
    source = GGUFSource(path)
    for name, shape in (("q_proj", (64, 64)), ("o_proj", (64, 64))):
        name = f"model.layers.0.self_attn.{name}.weight"
        whole, part = torch.empty(shape), torch.empty(32, 16)
        source.copy(name, shape, (slice(0, 64), slice(0, 64)), whole)
        source.copy(name, shape, (slice(32, 64), slice(16, 32)), part)
        torch.testing.assert_close(part, whole[32:, 16:32], rtol=0, atol=0)


def test_dropped_dimensions_of_size_one_come_back(tmp_path: Path) -> None:
    """REG-063."""
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    source = GGUFSource(path)
    entry = source.entries["model.norm.weight"]
    assert entry.fits((1, 64)) and entry.fits((64, 1)) and not entry.fits((2, 32))
    flat, column, row = torch.empty(64), torch.empty(64, 1), torch.empty(1, 64)
    source.copy("model.norm.weight", (64,), (slice(0, 64),), flat)
    source.copy("model.norm.weight", (1, 64), (slice(0, 1), slice(0, 64)), row)
    source.copy("model.norm.weight", (64, 1), (slice(0, 64), slice(0, 1)), column)
    torch.testing.assert_close(row[0], flat)
    torch.testing.assert_close(column[:, 0], flat)


def test_load_model_runs_from_gguf_to_a_packed_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tiny_model("qwen3"))
    model, report = load_model(gguf_spec(path), mesh=Mesh(), device=CPU, block_tokens=16)
    assert model.logits_width == 96 and report.weight_bytes > 0
    assert set(report.seconds) == {"open", "check", "build", "weights", "pack"}


def test_an_unsupported_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'clip'; supported in GGUF: afmoe, .*t5encoder"):
        GGUFSource(tmp_path / "m.gguf")


def test_an_unsupported_type_is_refused_by_tensor_and_with_the_list(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K

    def quantize(name: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        if name != "blk.0.ffn_down.weight":
            return values, None
        return np.zeros((values.shape[0], 292), np.uint8), kind

    model = tiny_model("llama", intermediate_size=256)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, quantize=quantize)
    with pytest.raises(
        CheckpointError, match=r"'blk\.0\.ffn_down\.weight' has the type Q8_K.*Q6_K"
    ):
        GGUFSource(path)


def test_llama3_rotary_factors_become_equal_longrope_lists(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny_model("llama"),
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    scaling = gguf_config(read_gguf(path))["rope_scaling"]
    assert scaling["short_factor"] == scaling["long_factor"] == factors.tolist()
    assert scaling["attention_factor"] == 1.0
    assert "rope_freqs.weight" not in GGUFSource(path).entries


def test_phi3_long_and_short_factors_mean_the_same_model(tmp_path: Path) -> None:
    long, short = [float(n) for n in range(2, 10)], [1.0 + n / 10 for n in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    rope |= {"long_factor": long, "short_factor": short, "original_max_position_embeddings": 64}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64).eval()

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_tensor("rope_factors_long.weight", np.array(long, np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(short, np.float32))

    path = write_gguf(tmp_path / "m.gguf", "phi3", model, extra=extra)
    again = type(model)(type(model.config).from_dict(gguf_config(read_gguf(path)))).eval()
    again.load_state_dict(model.state_dict())
    for length in (40, 100):
        ids = torch.arange(length)[None] % 90
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        model,
        extra=lambda writer: writer.add_tensor("blk.0.odd.weight", np.zeros((2, 2), np.float32)),
    )
    config = {**gguf_config(read_gguf(path)), "num_hidden_layers": 3}
    with pytest.raises(CheckpointError) as caught:
        load_model(spec_of(path, config), mesh=Mesh(), device=CPU, block_tokens=16)
    assert "9 tensors are missing: model.layers.2." in str(caught.value)
    assert "blk.0.odd.weight in" in str(caught.value)
