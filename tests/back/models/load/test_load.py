"""`load_model` for every way a model comes: safetensors, GGUF, dummy, and the fallback family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import save, spec_of_folder, tiny_model


def load(spec: ModelSpec) -> object:
    return load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)


@pytest.mark.parametrize("family", ["llama", "transformers"])
def test_a_folder_loads_into_its_family_and_into_the_fallback(family: str, tmp_path: Path) -> None:
    spec = spec_of_folder(save(tiny_model("llama"), tmp_path), family=family)
    model, report = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
    assert model.logits_width == 96 and len(model.kv_forms) == 2
    assert set(report.seconds) == {"open", "check", "build", "weights", "pack"}
    assert report.decisions and report.weight_bytes > 0


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
