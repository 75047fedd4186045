"""Decoders that no library has a class for, against references in plain PyTorch (MOD-17)."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, BothModels, compare, compare_last_tokens
from tests.references import arctic, grok, plamo3

REFERENCES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "grok-2": (grok, grok.CONFIG),
    "grok-1": (grok, grok.FIRST),
    "arctic": (arctic, arctic.CONFIG),
    "plamo-3": (plamo3, plamo3.CONFIG),
}
OF_GATE = ("grok-2", "arctic", "plamo-3")
"""The others are slow: they differ from one of these by names and keys."""


def case_of(name: str) -> Any:
    return pytest.param(name, marks=() if name in OF_GATE else pytest.mark.slow)


def both(name: str, folder: Path) -> BothModels:
    """Our model of a random checkpoint, and the logits of the reference."""
    reference, config = REFERENCES[name]
    weights = reference.tensors(config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    rows = random_rows(config["vocab_size"], LENGTHS)
    theirs = [reference.logits(config, weights, row) for row in rows]
    return BothModels(rows, theirs, load_ours(model_spec(folder)))


@pytest.mark.parametrize("name", [case_of(name) for name in REFERENCES])
def test_a_checkpoint_has_the_logits_of_its_reference(name: str, tmp_path: Path) -> None:
    rows, theirs, ours = both(name, tmp_path)
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_last_tokens_alone_have_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    compare_last_tokens(both(name, tmp_path))
