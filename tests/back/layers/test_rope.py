"""Rope is read alike from both spellings of config.json, and what is not understood is refused by
key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.back.layers.rope import RopeSpec, read_rope, rope_table
from headrace.base.config.hf import ConfigReader
from headrace.base.errors import CheckpointError


def read(config: dict[str, Any], **arguments: Any) -> RopeSpec:
    reader = ConfigReader({"max_position_embeddings": 64, **config}, "config.json")
    head_dim = config.get("head_dim", 21 if "num_attention_heads" in config else 8)
    return read_rope(reader, head_dim=head_dim, **{"max_positions": 64, **arguments})


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_both_spellings_of_a_scaling_give_the_same_frequencies() -> None:
    old = read({"rope_theta": 700.0, "rope_scaling": {"type": "llama3", **LLAMA3}})
    flat = read({"rope_parameters": {"rope_type": "llama3", "rope_theta": 700.0, **LLAMA3}})
    nested = read(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "llama3", "rope_theta": 700.0, **LLAMA3}
            }
        },
        layer_type="full_attention",
    )
    assert old == flat == nested
    assert old.kind == "llama3"


def test_gemma3_old_spelling_scales_only_the_global_layers() -> None:
    config = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    local = read(config, layer_type="sliding_attention", theta=10_000.0)
    whole = read(config, layer_type="full_attention", default_theta=1e6)
    assert local.kind == "default"
    assert local.frequencies[0] == 1.0
    assert whole.frequencies[0] == 0.125


def test_partial_rotary_rotates_the_first_dimensions_only() -> None:
    assert read({"partial_rotary_factor": 0.5}).rotary_dim == 4
    assert read({"rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_dim == 2


def test_null_scaling_is_no_scaling() -> None:
    assert read({"rope_scaling": None}) == read({})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"head_dim": 63}, "head_dim"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_a_wrong_or_unknown_value_is_refused_by_key(config: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    assert caught.value.field == field


def test_longrope_chooses_by_the_longest_sequence_the_engine_allows() -> None:
    scaling = {
        "type": "su",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    short = read({"rope_scaling": scaling}, max_positions=32)
    long = read({"rope_scaling": scaling}, max_positions=33)
    assert short.frequencies == pytest.approx([2 * one for one in long.frequencies])
    assert short.attention_factor == long.attention_factor == pytest.approx((1 + 1 / 5) ** 0.5)


def test_table_holds_cosines_then_sines_of_every_position() -> None:
    spec = RopeSpec(kind="default", head_dim=4, frequencies=(1.0, 0.1), attention_factor=2.0)
    table = rope_table(spec, 3)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(table, 2 * torch.cat((angles.cos(), angles.sin()), dim=1))
