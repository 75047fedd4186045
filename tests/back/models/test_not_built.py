"""What does not run is refused by name, with what it needs (MOD-17)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lab.coverage import TABLES, rows, tried
from headrace.back.models.families import FALLBACK, family_of
from headrace.back.models.not_built import BLOCKED, MISSING, missing_table
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts

BY_FALLBACK = {"BertGenerationDecoder": "bert-generation", "RoCBertForCausalLM": "roc_bert"}
"""Of the tables' names those that the fallback runs, and their `model_type`."""


@pytest.mark.parametrize("table", TABLES)
def test_every_text_class_of_transformers_runs_or_says_what_it_needs(table: str) -> None:
    left = {name for _, name, family in rows(table) if family == FALLBACK}
    assert left - BY_FALLBACK.keys() - BLOCKED.keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_FALLBACK)
def test_what_is_left_to_the_fallback_runs(name: str) -> None:
    assert tried(BY_FALLBACK[name], name) == "runs"


def test_what_is_blocked_has_no_family() -> None:
    native = {
        name
        for name in BLOCKED
        if family_of({"architectures": [name], "text_config": {}}) != FALLBACK
    }
    assert native == set()
    assert len(BLOCKED) == sum(len(row.names) for row in MISSING)


def test_the_page_of_models_has_the_table() -> None:
    """`python -m benchmarks.lab.coverage --write` writes it."""
    page = Path(__file__).parents[3] / "docs" / "MODELS.md"
    assert missing_table() in page.read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ProphetNetForCausalLM", "it needs the encoder that it reads from"),
        ("XLNetLMHeadModel", "it needs attention in both directions over a permutation"),
        ("ReformerModelWithLMHead", "it needs attention among tokens of one hash"),
    ],
)
def test_a_blocked_architecture_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    """Before anything else of its config is asked for."""
    config = {"architectures": [name], "model_type": "any", "vocab_size": 9, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    located = LocatedModel(path=tmp_path, name="m", format="dummy")
    with pytest.raises(CheckpointError, match=f"{name} is not built: {words}"):
        read_model_facts(located)
