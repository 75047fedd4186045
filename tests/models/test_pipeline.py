"""PAR-05: stages that hand the residual on give the logits of one model, bit for bit; what a stage does
not have is not asked of the checkpoint; models that are no plain row of layers are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as replaced

from headrace.back.attention.plan import Batch
from headrace.back.models.load import load_model
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.registry import build_model
from headrace.base.errors import ConfigError
from tests.back.runner.staged import CPU, QueuedPipe, mesh_of, pipes_of
from tests.back.runner.test_stages import spec_of
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import CASES, tiny_config

META = torch.device("meta")
REFUSED = {
    "glm-dsa", "deepseek-v4", "hy-v4", "longcat-flash", "qwen4", "openai-gpt", "gemma4", "gemma4-shared",
    "gemma4-experts", "gemma3n", "gemma3n-third-stream", "zamba", "rwkv", "doge", "zaya", "inkling", "inkling-2",
    "hrm-text", "zamba2", "zamba2-plain", "opt-post", "gemma4-unified", "gemma4-unified-shared",
}  # fmt: skip
"""Several residuals, inputs of layers beside it, or places where a layer leaves something for others."""


class Staged:
    """Stages one behind the other, as one model."""

    def __init__(self, stages: list[LoadableModel]) -> None:
        self.stages = stages
        self.kv_forms = tuple(form for stage in stages for form in stage.kv_forms)

    def forward(self, batch: Batch) -> torch.Tensor:
        first = 0
        for stage in self.stages:
            own = slice(first, first + len(stage.kv_forms))
            part = {"kv": batch.kv[own], "group_of_layer": batch.group_of_layer[own]}
            hidden = stage.forward(replace(batch, **part))
            first = own.stop
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.stages[-1].logits(hidden)


def staged(spec: object, pipes: list[QueuedPipe]) -> Staged:
    return Staged([load_ours(spec, mesh=mesh_of(pipe)) for pipe in pipes])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "count"),
    [
        *((case, 2) for case in CASES),
        ("llama", 3),
    ],
)
def test_stages_give_the_logits_of_one_model(case: str, count: int, tmp_path: Path) -> None:
    save_oracle(tiny_config(case), tmp_path)
    spec = model_spec(tmp_path)
    if case in REFUSED:
        with pytest.raises(ConfigError, match=r"--pipeline-parallel 2: .*tensor-parallel"):
            staged(spec, pipes_of(count))
        return
    rows = random_rows(spec.logits_width, (19, 11))
    sizes = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    ours = teacher_forced(staged(spec, pipes_of(count)), rows, **sizes)
    alone = teacher_forced(load_ours(spec), rows, **sizes)
    assert all(torch.equal(one, other) for one, other in zip(ours, alone, strict=True))


def test_a_stage_loads_its_own_tensors_alone() -> None:
    """A tied head reads the table of tokens, so that both outer stages have it."""
    spec = replaced(spec_of().model, max_model_len=64)
    first, last = (
        load_model(spec, mesh=mesh_of(pipe, (7, 1)), device=CPU, block_tokens=BLOCK_TOKENS)[0]
        for pipe in pipes_of(2)
    )
    names = [
        {piece.name for param in model.weights.params for piece in param.pieces}
        for model in (first, last)
    ]
    assert {name for name in names[0] if ".layers.7." in name} == set()
    assert {name.split(".")[2] for name in names[1] if ".layers." in name} == {"7"}
    assert names[0] & names[1] == {"model.embed_tokens.weight"}
    assert "model.norm.weight" in names[1] - names[0]


def test_a_table_that_both_outer_stages_hold_weighs_on_both() -> None:
    """The bundled model's eight layers, around a tied table of tokens."""
    spec = replaced(spec_of().model, max_model_len=64)
    layers = [
        len(build_model(spec, mesh=mesh_of(pipe), device=META, block_tokens=8).weights.layers)
        for pipe in pipes_of(2)
    ]
    assert layers == [4, 4]
