"""Sparse latent attention reads the chosen positions and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.models.glm_moe_dsa import shared_layers
from headrace.base.config.hf import ConfigReader
from headrace.base.errors import CheckpointError
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import SIZES, tiny_config

LENGTHS = (30, 12)


def logits(folder: Path, **changes: object) -> list[torch.Tensor]:
    ours = load_ours(model_spec(folder, **changes))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    return teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)


def test_with_as_many_choices_as_positions_it_is_dense_attention(tmp_path: Path) -> None:
    """KRN-03."""
    save_oracle(tiny_config("deepseek-v3.2"), tmp_path)
    sparse, all_chosen = logits(tmp_path), logits(tmp_path, index_topk=max(LENGTHS))
    more = logits(tmp_path, index_topk=4 * max(LENGTHS))
    for one, other, third in zip(sparse, all_chosen, more, strict=True):
        torch.testing.assert_close(other, third)
        torch.testing.assert_close(one[:7], other[:7])
        assert (one[8:] - other[8:]).abs().max() > 1e-2


def test_an_indexer_without_the_queries_down_projection_is_refused(tmp_path: Path) -> None:
    save_oracle(tiny_config("deepseek-v3.2"), tmp_path)
    with pytest.raises(CheckpointError, match="q_lora_rank"):
        load_ours(model_spec(tmp_path, q_lora_rank=None))
    with pytest.raises(CheckpointError, match="index_head_dim"):
        load_ours(model_spec(tmp_path, index_head_dim=4))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [False] * 5),
        ({"index_topk_pattern": "FSSFS"}, [False, True, True, False, True]),
        ({"index_topk_freq": 3}, [False, False, True, True, False]),
        (
            {"indexer_types": ["full", "full", "shared", "full", "full"]},
            [False, False, True, False, False],
        ),
    ],
)
def test_layers_share_a_choice_as_the_config_says(
    changes: dict[str, object], expected: list[bool]
) -> None:
    assert shared_layers(ConfigReader(changes, "config.json"), 5) == expected


@pytest.mark.parametrize("pattern", ["SFFFF", "FF", "FXFFF"])
def test_a_choice_that_nobody_makes_is_refused_by_key(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"index_topk_pattern is .* the first one full"):
        shared_layers(ConfigReader({"index_topk_pattern": pattern}, "config.json"), 5)
