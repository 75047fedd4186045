"""Drafters are found, and those that cannot work are refused with the numbers, before weights are read (SPC-06)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.resolved import EngineSpec, SpeculationSpec
from headrace.base.config.tree import (
    DeviceOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.errors import CheckpointError, ConfigError, HeadraceError
from headrace.launch.facts import resolve_options
from tests.back.speculative.checkpoints import save_head

MODEL = Path(__file__).parents[2] / "demo" / "model"


def engine_of(
    fields: dict[str, Any], *, device: DeviceOptions | None = None, model: str = ""
) -> EngineSpec:
    tree = Options(
        device=device or DeviceOptions(device="cpu"),
        model=ModelOptions(model=model, max_model_len=256),
        scheduler=SchedulerOptions(speculative_config=SpeculationOptions(**fields)),
    )
    return resolve_options(tree).engine


def speculation(**fields: Any) -> SpeculationSpec:
    spec = engine_of(fields).speculation
    assert spec is not None
    return spec


def test_a_method_goes_by_the_names_of_other_servers() -> None:
    assert speculation(method="ngram_gpu").method == "ngram"
    ways = {"rejection_sample_method": "block", "draft_sample_method": "greedy"}
    assert speculation(method="ngram", **ways) == speculation(method="ngram")
    assert speculation(method="auto").method == "ngram"  # the bundled model carries no head
    few = speculation(method="ngram", disable_by_batch_size=3, draft_tensor_parallel_size=1)
    assert (few.num_tokens, few.max_rows) == (6, 3)


@pytest.mark.parametrize(
    ("kind", "method", "drafts"),
    [("eagle3", "eagle3", 4), ("eagle", "eagle", 4), ("mtp", "mtp", 3)],
)
def test_auto_takes_what_the_named_folder_holds(
    kind: str, method: str, drafts: int, tmp_path: Path
) -> None:
    save_head(tmp_path, kind)
    found = speculation(model=str(tmp_path))
    assert (found.method, found.num_tokens) == (method, drafts)
    assert found.model is not None and found.model.path == str(tmp_path)


def test_auto_takes_the_head_that_the_models_own_files_hold(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.zeros(384, 768)}, tmp_path / "model.safetensors")
    found = engine_of({}, model=str(tmp_path)).speculation
    assert found is not None and found.method == "mtp"


def draft_model(folder: Path, **changes: Any) -> Path:
    """The bundled model's files under another config."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_what_cannot_draft_is_refused_with_the_numbers(tmp_path: Path) -> None:
    save_head(tmp_path / "wide", "eagle3", hidden_size=512)
    save_head(tmp_path / "known", "eagle3", vocab_size=128256)
    other = draft_model(tmp_path / "other", vocab_size=5000)
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"model": str(tmp_path / "wide")},
            "hidden_size is 512, but the model's hidden size is 384",
        ),
        (
            {"model": str(tmp_path / "known")},
            "vocab_size is 128256, but the model's vocabulary is 4096",
        ),
        (
            {"method": "draft_model", "model": str(other)},
            "knows 5000 tokens, the model 4096; both must have one vocabulary",
        ),
        ({"method": "ngram", "model": "x"}, 'has no weights, but "model" is x'),
        (
            {"method": "custom_class", "model": "a.b.C"},
            """"model" is 'a.b.C', no drafter that is installed and allowed by --extensions (there are: none""",
        ),
        (
            {
                "method": "ngram",
                "rejection_sample_method": "synthetic",
                "num_speculative_tokens": 2,
            },
            "2 rates are wanted, none greater than the one before it; none given",
        ),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": (0.8, 0.5),
            },
            "synthetic needs --enforce-eager on a CPU",
        ),
        (
            {"method": "ngram", "synthetic_acceptance_rates": (0.5,)},
            "goes with rejection_sample_method synthetic",
        ),
        (
            {"method": "ngram", "draft_sample_method": "probabilistic"},
            "probabilistic is for networks (draft_model, eagle,",
        ),
        ({"method": "mtp"}, "carries no head for multi-token prediction; use ngram"),
        ({"method": "draft_model"}, """method 'draft_model' needs "model\""""),
        ({"method": "dspark"}, """method 'dspark' needs "model\""""),
        (
            {"model": str(tmp_path / "none")},
            f"--speculative-config: model {tmp_path / 'none'}: there is no such folder or file",
        ),
    ]
    for fields, said in refused:
        with pytest.raises(ConfigError) as caught:
            engine_of(fields)
        assert said in caught.value.message, fields
        assert caught.value.field == "speculative_config", fields


def broken(folder: Path, change: str) -> str:
    """A head with one flaw, and what is said of it."""
    tensors = save_head(folder, "eagle3")
    config = json.loads((folder / "config.json").read_text())
    if change == "lacks a tensor":
        del tensors["midlayer.mlp.up_proj.weight"]
        said = "1 tensor is missing: midlayer.mlp.up_proj.weight [96, 384]"
    elif change == "misshapen":
        tensors["fc.weight"] = tensors["fc.weight"][:, :768].contiguous()
        said = "has the shape [384, 768], not [384, 1152]"
    elif change == "not finite":
        tensors["norm.weight"][3] = float("nan")
        said = "tensor 'norm.weight' holds NaN or Inf"
    elif change == "two layers":
        config["num_hidden_layers"] = 2
        said = "a head of 2 layers; heads have 1"
    else:
        config["eagle_aux_hidden_state_layer_ids"] = [2, 9, 31]
        said = "in front of layers 2, 9, 31, the model has layers 0 to 7"
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return said


@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
@pytest.mark.parametrize(
    "change", ["lacks a tensor", "misshapen", "not finite", "two layers", "taps of another model"]
)
def test_a_broken_head_ends_the_start_with_what_is_wrong(change: str, tmp_path: Path) -> None:
    said = broken(tmp_path, change)
    with pytest.raises(HeadraceError) as caught:
        InlineExecutor(engine_of({"model": str(tmp_path)}))
    assert isinstance(caught.value, CheckpointError | ConfigError)
    assert said in caught.value.message
