"""`load_model` for every way a model comes: safetensors, GGUF, dummy, and the fallback family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.models.protocol import LoadableModel
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import save, spec_of_folder, tiny_model
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config


def load(spec: ModelSpec, *, block_tokens: int = 16) -> LoadableModel:
    cpu = torch.device("cpu")
    return load_model(spec, mesh=Mesh(), device=cpu, block_tokens=block_tokens)[0]


@pytest.mark.parametrize("family", ["llama", "transformers"])
def test_a_folder_loads_into_its_family_and_into_the_fallback(family: str, tmp_path: Path) -> None:
    spec = spec_of_folder(save(tiny_model("llama"), tmp_path), family=family)
    model, report = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
    assert model.logits_width == 96 and len(model.kv_forms) == 2
    assert set(report.seconds) == {"open", "check", "build", "weights", "pack"}
    assert report.decisions and report.weight_bytes > 0


def test_files_of_a_base_model_load_whatever_head_their_config_names(tmp_path: Path) -> None:
    """The first GPT-2 files: no prefix, and the masks among the weights."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    oracle.save_pretrained(tmp_path)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    save_file({**oracle.transformer.state_dict(), **masks}, tmp_path / "model.safetensors")
    model = load(model_spec(tmp_path, max_model_len=64), block_tokens=BLOCK_TOKENS)
    row = list(range(11))
    ours = teacher_forced(model, [row], block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    torch.testing.assert_close(ours, oracle_logits(oracle, [row]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["kimi-linear", "olmo-hybrid"])
def test_tensors_may_have_other_names_in_a_checkpoint(case: str, tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config(case), tmp_path)
    model = load(model_spec(tmp_path), block_tokens=BLOCK_TOKENS)
    row = list(range(11))
    ours = teacher_forced(model, [row], block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    torch.testing.assert_close(ours, oracle_logits(oracle, [row]), rtol=1e-4, atol=1e-4)


def test_experts_load_from_one_tensor_as_from_many(tmp_path: Path) -> None:
    """MOD-11: Qwen 3.5 is published with one tensor for the experts of a layer."""
    oracle = save_oracle(tiny_config("qwen3.5-moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{stem}.{i}.{name}_proj.weight") for i in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{stem}.gate_up_proj"] = torch.cat((gates, ups), dim=1)
        tensors[f"{stem}.down_proj"] = downs.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(model_spec(tmp_path), block_tokens=BLOCK_TOKENS)
    row = list(range(11))
    ours = teacher_forced(model, [row], block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    torch.testing.assert_close(ours, oracle_logits(oracle, [row]), rtol=1e-4, atol=1e-4)


def test_a_fault_is_found_for_the_fallback_too(tmp_path: Path) -> None:
    spec = spec_of_folder(save(tiny_model("llama"), tmp_path), family="transformers")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the weights are missing"):
        load(spec)


@pytest.mark.parametrize("family", ["llama", "transformers"])
def test_dummy_weights_need_no_file(family: str) -> None:
    config = {**tiny_model("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    spec = ModelSpec(
        path="/nowhere",
        name="tiny",
        format="dummy",
        family=family,
        dtype="bfloat16",
        max_model_len=64,
        logits_width=96,
        eos_ids=(),
        config=config,
    )
    model, report = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
    assert model.logits_width == 96
    assert set(report.seconds) == {"build", "weights", "pack"}


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    spec = spec_of_folder(save(tiny_model("llama"), tmp_path), format="pickle")
    with pytest.raises(CheckpointError, match="not one of gguf, safetensors, dummy"):
        load(spec)
