"""GGUF metadata become the config.json the same model has."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config.gguf import GGUFFile, GGUFTensor
from headrace.base.config.gguf_config import gguf_config, gguf_generation
from headrace.base.config.gguf_types import TYPES
from headrace.base.errors import CheckpointError


def file_of(
    name: str, tensors: dict[str, tuple[int, ...]] | None = None, **changes: Any
) -> GGUFFile:
    """A GGUF model as if read, with 2 layers; `changes` are metadata of the architecture (`__` is a dot)."""
    values: dict[str, Any] = {
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 256,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    shapes = {"token_embd.weight": (96, 64), "a": (1,), "b": (1,), "c": (1,), **(tensors or {})}
    return GGUFFile(
        paths=(Path("/m.gguf"),),
        metadata={
            "general.architecture": name,
            **{f"{name}.{key}": value for key, value in values.items() if value is not None},
        },
        tensors={
            key: GGUFTensor(
                name=key,
                shape=shape,
                type=TYPES[0],
                path=Path("/m.gguf"),
                offset=0,
                num_bytes=0,
            )
            for key, shape in shapes.items()
        },
    )


def test_sizes_and_defaults() -> None:
    config = gguf_config(file_of("llama"))
    assert config["architectures"] == ["LlamaForCausalLM"] and config["head_dim"] == 16
    assert config["vocab_size"] == 96 and config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 10000.0 and "rope_scaling" not in config
    untied = gguf_config(file_of("llama", {"output.weight": (96, 64)}))
    assert untied["tie_word_embeddings"] is False


def test_rotary_scalings() -> None:
    linear = file_of("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert gguf_config(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = file_of(
        "qwen3",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    assert gguf_config(yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type is 'odd'.*linear, longrope"):
        gguf_config(file_of("llama", rope__scaling__type="odd"))


def test_layer_patterns_the_metadata_leave_unsaid() -> None:
    gemma2 = gguf_config(file_of("gemma2", attention__sliding_window=8))
    assert gemma2["layer_types"] == ["sliding_attention", "full_attention"]
    assert gemma2["query_pre_attn_scalar"] == 16 and gemma2["sliding_window"] == 8
    assert gguf_config(file_of("smollm3", block_count=4))["no_rope_layers"] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_length": None}, "embedding_length is None"),
        ({"embedding_length": 0}, "at least 1"),
        ({"block_count": 1 << 31}, "at most the number of tensors, 4"),
        ({"attention__head_count": array("I", [4, 2])}, "head_count is array.*same number"),
        ({"attention__key_length": 15}, "an even number"),
        ({"attention__value_length": 8}, "the key length 16"),
        ({"context_length": "long"}, "context_length is 'long'"),
        ({"rope__freq_base": "x"}, "must be a number"),
    ],
)
def test_wrong_metadata_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_config(file_of("llama", **changes))


def test_rotary_factors_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight has the shape \(4,\), not \(8,\)"
    ):
        gguf_config(file_of("llama", {"rope_freqs.weight": (4,)}))


def test_a_model_without_an_embedding_is_refused() -> None:
    file = file_of("llama")
    bare = GGUFFile(paths=file.paths, metadata=file.metadata, tensors={"a": file.tensors["a"]})
    with pytest.raises(CheckpointError, match=r"block_count|token_embd\.weight is missing"):
        gguf_config(bare)


def test_sampling_defaults_take_our_names() -> None:
    file = GGUFFile(
        paths=(Path("/m.gguf"),),
        metadata={"general.sampling.temp": 0.5, "general.sampling.penalty_repeat": 1.1},
        tensors={},
    )
    assert gguf_generation(file) == {"temperature": 0.5, "repetition_penalty": 1.1}
