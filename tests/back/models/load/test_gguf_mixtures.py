"""GGUF files with experts: the logits of the model they were written from; blocks kept as the file holds them
(QNT-15, QNT-17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Axis, Mesh
from tests.back.models.load.checkpoints import MIXTURES, tiny_model, write_gguf
from tests.back.models.load.test_gguf_blocks import (
    NO_GROUP,
    blocks,
    dequantized,
    gguf_spec,
    library,
    run,
)
from tests.models.oracle import oracle_logits
from tests.models.paged import teacher_forced

CPU = torch.device("cpu")
ROWS = [list(range(3, 30)), [5, 1, 2]]


def load(spec: Any) -> Any:
    return load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)


def logits(model: Any) -> list[torch.Tensor]:
    return teacher_forced(model, ROWS, block_tokens=16, dtype=torch.float32)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_plain_files_answer_as_transformers(architecture: str, tmp_path: Path) -> None:
    oracle = tiny_model(architecture)
    model, _ = load(gguf_spec(write_gguf(tmp_path / "m.gguf", architecture, oracle)))
    for mine, theirs in zip(logits(model), oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_stay_as_the_file_holds_them(architecture: str, kind: str, tmp_path: Path) -> None:
    oracle = tiny_model(architecture)
    spec = gguf_spec(write_gguf(tmp_path / "m.gguf", architecture, oracle, quantize=library(kind)))
    ours, report = load(spec)
    kept = next(one for one in report.decisions if one.field == "weights")
    assert kept.chosen.endswith(kind) and "dequantized" not in kept.why
    assert any("experts_quant" in str(one) for one in report.decisions)
    exact, got = run(dequantized(spec)), run(ours)
    alike = torch.nn.functional.cosine_similarity(got, exact)
    assert (got - exact).norm() / exact.norm() > 0 and alike.mean() > 0.98, alike


def test_gates_ups_and_downs_of_other_types_go_together(tmp_path: Path) -> None:
    oracle = tiny_model("qwen3moe", hidden_size=256, moe_intermediate_size=256)
    kinds = {"gate_exps": "Q4_K", "up_exps": "Q5_K", "down_exps": "Q6_K"}
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", oracle, quantize=blocks(kinds, "F32"))
    model, report = load(gguf_spec(path))
    kept = next(one for one in report.decisions if one.field == "weights")
    assert kept.chosen == "10 Q4_K, 10 Q5_K, 10 Q6_K"
    exact, got = run(dequantized(gguf_spec(path))), run(model)
    assert torch.nn.functional.cosine_similarity(got, exact).mean() > 0.98


@pytest.mark.parametrize("inner, kept", [(128, True), (96, False)])
def test_a_split_within_a_block_is_dequantized(inner: int, kept: bool, tmp_path: Path) -> None:
    oracle = tiny_model("qwen3moe", moe_intermediate_size=inner)
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", oracle, quantize=library("Q8_0"))
    mesh = Mesh(tp=Axis(size=2, rank=1, group=NO_GROUP))
    model, _ = load_model(gguf_spec(path), mesh=mesh, device=CPU, block_tokens=16)
    experts = [one for one in model.weights.params if "experts" in one.name]
    assert experts and all((one.on_blocks is not None) == kept for one in experts)
