"""Ring linear and Ring 2.5, which no library has a class for, against an independent reference: teacher-forced logits
of a paged, chunked run, and greedy tokens through the engine behind a snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_mixture import NUM_TOKENS, answers
from tests.models.test_parity import LENGTHS, compare
from tests.models.test_recurrent import engine, prompts_of
from tests.references import bailing_linear

CONFIGS = {"heads": bailing_linear.CONFIG, "latents": bailing_linear.LATENT}


def checkpoint(
    folder: Path, config: dict[str, Any] = bailing_linear.CONFIG
) -> dict[str, torch.Tensor]:
    weights = bailing_linear.tensors(config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize("name", CONFIGS)
def test_it_has_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    config, weights = CONFIGS[name], checkpoint(tmp_path, CONFIGS[name])
    rows = random_rows(config["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, [bailing_linear.logits(config, weights, row) for row in rows], 1e-4)


def test_its_tokens_are_the_references_in_chunks_and_behind_a_snapshot(tmp_path: Path) -> None:
    weights, core = checkpoint(tmp_path), engine(tmp_path)

    def greedy(prompt: list[int]) -> list[int]:
        row = list(prompt)
        for _ in range(NUM_TOKENS):
            row.append(int(bailing_linear.logits(bailing_linear.CONFIG, weights, row)[-1].argmax()))
        return row[len(prompt) :]

    (first,) = prompts_of(41)
    assert answers(core, {1: first}) == ({1: greedy(first)}, 0)
    follow_up = [*first, 3, 1, 4]
    assert answers(core, {2: follow_up}) == ({2: greedy(follow_up)}, 32)
    core.executor.close()
