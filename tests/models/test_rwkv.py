"""RWKV 6 and 7, which transformers has no class for, against independent references: teacher-forced logits of a chunked
run, and greedy tokens through the engine in chunks, beside others and behind a snapshot, on recorded steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.errors import CheckpointError
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_mixture import NUM_TOKENS, answers
from tests.models.test_parity import LENGTHS, compare
from tests.models.test_recurrent import engine, prompts_of
from tests.references import rwkv6, rwkv7

Tensors = dict[str, torch.Tensor]
CASES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "rwkv7": (rwkv7, rwkv7.CONFIG),
    "rwkv6": (rwkv6, rwkv6.CONFIG),
}

UNRECORDED = ("rwkv6",)
"""They use operations of PyTorch."""


def checkpoint(folder: Path, name: str, **changes: Any) -> tuple[Tensors, dict[str, Any]]:
    module, config = CASES[name]
    config = config | changes
    weights = module.tensors(config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights, config


@pytest.mark.parametrize("name", CASES)
def test_it_has_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    weights, config = checkpoint(tmp_path, name)
    rows = random_rows(config["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, [CASES[name][0].logits(config, weights, row) for row in rows], 1e-4)


@pytest.mark.parametrize("name", ["rwkv7", pytest.param("rwkv6", marks=pytest.mark.slow)])
def test_tokens_are_the_references_in_chunks_and_behind_a_snapshot(
    name: str, tmp_path: Path
) -> None:
    """ENG-10: beside another request, and a follow-up that begins from a snapshot."""
    (weights, config), core = checkpoint(tmp_path, name), engine(tmp_path)

    def greedy(prompt: list[int]) -> list[int]:
        row = list(prompt)
        for _ in range(NUM_TOKENS):
            row.append(int(CASES[name][0].logits(config, weights, row)[-1].argmax()))
        return row[len(prompt) :]

    first, second = prompts_of(41, 23)
    prompts = {1: first, 2: second}
    assert answers(core, prompts) == ({id: greedy(one) for id, one in prompts.items()}, 0)
    follow_up = [*first, *second[:5]]
    assert answers(core, {3: follow_up}) == ({3: greedy(follow_up)}, 32)
    if isinstance(load(), NativeLibrary) and name not in UNRECORDED:
        replay = core.executor._resident.runner._steps._replay
        assert replay.foreign == () and replay.num_graphs > 0
    core.executor.close()


def test_shifts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    """As the first converted checkpoints have them."""
    weights, config = checkpoint(tmp_path, "rwkv7")
    stacked = dict(weights)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.attn.x_"
        stacked[f"{at}x"] = torch.stack([stacked.pop(f"{at}{letter}") for letter in "rwkvag"])
    save_file(stacked, tmp_path / "model.safetensors")
    core = engine(tmp_path)
    (prompt,) = prompts_of(9)
    expected = int(rwkv7.logits(config, weights, prompt)[-1].argmax())
    assert answers(core, {1: prompt}, 1) == ({1: [expected]}, 0)
    core.executor.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn": {"layers": [1]}}, "attn is .* null"),
        ({"head_dim": 13}, "head_dim is 13 .* a divisor of hidden_size"),
        ({"value_dim": [48, 96, 48]}, "value_dim is .* hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_built_is_refused_by_key(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, "rwkv7")
    with pytest.raises(CheckpointError, match=words):
        load_ours(model_spec(tmp_path, **changes))
