"""Formats, poolings and executors of an installed package (ENG-20)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.executor.choose import make_executor
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base import extensions
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import DeviceOptions, ModelOptions, Options, SchedulerOptions
from headrace.base.errors import CheckpointError, ConfigError
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced

CODE = """
HEADRACE_API = 1
from headrace.back.executor.null import NullExecutor
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.arrangement import Arrangement
from headrace.base.config.quantization import Numbers, everything

class Halves:
    # each value is half of what is stored, times a scale of its row
    arrangement = Arrangement(
        roles={"values": "{module}.twice", "scales": "{module}.row"},
        dtypes=("I8",),
        shape=lambda stored: stored.shape("values"),
        expected=lambda shape, numbers: {"scales": ((shape[0],),)},
    )

    def read(self, config):
        numbers = Numbers(arrangement="halves", bits=config.int("bits"))
        return everything("halves", numbers, ())

    def groups(self, tensor, read, rows, columns):
        return Groups(
            values_RC=read("values", rows, columns).float() / 2, scales_RG=read("scales", rows)[:, None]
        )

class NoFormat(Halves):
    def read(self, config):
        raise ValueError("not today")

halves, no_format = Halves(), NoFormat()

def greatest(hidden_TE):
    return hidden_TE.amax(0)

def odd(hidden_TE):
    return hidden_TE[:, :3]

class Mine(NullExecutor):
    pass
"""
ENTRIES = """
[headrace.quantizations]
halves = tinyforms:halves
no_format = tinyforms:no_format

[headrace.poolers]
greatest = tinyforms:greatest
odd = tinyforms:odd

[headrace.executors]
mine = tinyforms:Mine
"""
NAMES = ("halves", "no_format", "greatest", "odd", "mine")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tinyforms.py").write_text(CODE)
    info = tmp_path / "tinyforms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyforms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    extensions.allow(())
    sys.modules.pop("tinyforms", None)


def engine_of(*names: str, **device: Any) -> EngineSpec:
    tree = Options(
        device=DeviceOptions(device="cpu", **device),
        model=ModelOptions(max_model_len=128, dtype="float32", extensions=names),
        scheduler=SchedulerOptions(max_step_tokens=16, max_running=4),
    )
    return resolve_options(tree).engine


def pooling_request(id: int, how: str) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=np.arange(100, 140, dtype="<i4").tobytes(),
        stop=StopRules(max_tokens=0),
        sampling=RowSampling(),
        pooling=RowPooling(how=how),
    )


def test_a_package_s_function_pools_prompts_whole(package: None) -> None:
    """In chunks of 16 tokens; what fails ends its own request."""
    spec = engine_of("greatest", "odd")
    core = EngineCore(spec, make_executor(spec))
    for id, how in enumerate(("tokens", "greatest", "odd", "mean", "best"), start=1):
        core.add(pooling_request(id, how))
    vectors: dict[int, list[np.ndarray]] = {}
    errors: dict[int, Any] = {}
    while core.has_work:
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for id, pooled in batch.pooled:
            vectors.setdefault(id, []).append(pooled.values)
        errors |= {end.id: end.error for end in batch.finished if end.error is not None}
    core.close()
    tokens = np.concatenate(vectors[1])
    assert tokens.shape[0] == 40
    np.testing.assert_allclose(vectors[2][0], tokens.max(axis=0, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(
        vectors[4][0], tokens.mean(axis=0, keepdims=True), rtol=1e-4, atol=1e-5
    )
    assert errors.keys() == {3, 5}
    assert "extension odd: gives [40, 3]; a vector of" in errors[3].message
    assert "'best', not one of cls, last, mean, tokens, lexical, greatest, odd" in errors[5].message


def test_a_package_s_executor_runs_the_steps(package: None) -> None:
    with pytest.raises(ConfigError, match=r"--executor 'mine' is not known .known: auto, inline"):
        engine_of(executor="mine")
    spec = engine_of("mine", executor="mine", threads=1)
    executor = make_executor(spec)
    assert type(executor).__name__ == "Mine"
    executor.close()


def quantized(folder: Path, method: str) -> tuple[Path, Path]:
    """A tiny checkpoint in the format, and a plain one of the same numbers."""
    save_oracle(tiny(), folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    stored = {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        row_R = weight.abs().amax(1) / 60
        twice = (2 * weight / row_R[:, None]).round().to(torch.int8)
        stored[name.replace("weight", "twice")], stored[name.replace("weight", "row")] = (
            twice,
            row_R,
        )
        tensors[name] = twice.float() / 2 * row_R[:, None]
    save_file(tensors, folder / "plain" / "model.safetensors")
    (folder / "quantized").mkdir()
    save_file(stored, folder / "quantized" / "model.safetensors")
    config = json.loads((folder / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 8}
    (folder / "quantized" / "config.json").write_text(json.dumps(config))
    return folder / "plain", folder / "quantized"


def logits_of(folder: Path) -> list[torch.Tensor]:
    model, _ = load_model(
        model_spec(folder), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    rows = random_rows(97, (13, 5))
    return teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)


def test_a_package_s_format_of_weights_is_read(package: None, tmp_path: Path) -> None:
    plain, stored = quantized(tmp_path, "halves")
    with pytest.raises(CheckpointError, match="quant_method"):
        logits_of(stored)
    extensions.allow(["halves", "no_format"])
    for ours, theirs in zip(logits_of(stored), logits_of(plain), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "no_format"
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"extension no_format cannot read .*not today"):
        logits_of(stored)


def tiny() -> Any:
    from transformers import Qwen3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3Config(
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **sizes,
    )
