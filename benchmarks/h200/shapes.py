"""The shapes that are measured on one H200, their bars, and the physical floor of a decode step.

A folder with config.json is all that dummy weights need. The tokenizer of the server runs is made up too: every id
is some text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

BYTES_PER_S = 4.346e12
"""Memory read rate of an H200, measured (a large sum)."""
FLOPS = 795e12
"""bf16 matrix product of 8192^3 on random data, measured."""

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": _COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
}
# (batch, prompt): ms a decode step may take
STEP_BARS = {
    "qwen3-8b": {
        (1, 128): 4.1,
        (8, 128): 4.4,
        (32, 128): 4.8,
        (128, 128): 6.7,
        (256, 128): 10.0,
        (256, 1024): 15.5,
    },
    "qwen3-0.6b": {(1, 128): 0.75, (32, 128): 1.0, (256, 128): 3.4},
}
PREFILL_BARS = {"qwen3-8b": {(1, 8192): 42_000, (16, 1024): 48_000}, "qwen3-0.6b": {}}
OFFLINE_BARS = {"qwen3-8b": 7_600, "qwen3-0.6b": 31_000}


def write_model(folder: Path, shape: str) -> Path:
    """A folder that `--load-format dummy` can serve, with a tokenizer in which every id has a text."""
    config, target = SHAPES[shape], folder / shape
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"\u0120w{i}" for i in range(config["vocab_size"] - len(alphabet))]
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **level},
        "model": {"type": "BPE", "vocab": {w: i for i, w in enumerate(words)}, "merges": []},
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def num_weights(shape: str) -> int:
    """Weights that a decode step reads: all but the embedding table, unless it is the head too."""
    c = SHAPES[shape]
    beside_kv, kv = _layer_weights(shape)
    layers = c["num_hidden_layers"] * (beside_kv + kv)
    return int(layers + c["vocab_size"] * c["hidden_size"])


def _layer_weights(shape: str) -> tuple[int, int]:
    """Of one layer: all but those that make keys and values, and these."""
    c = SHAPES[shape]
    width, head_dim = c["hidden_size"], c["head_dim"]
    rest = width * 2 * c["num_attention_heads"] * head_dim + 3 * width * c["intermediate_size"]
    return rest, width * 2 * c["num_key_value_heads"] * head_dim


def step_floor_ms(shape: str, *, batch: int, context: float) -> float:
    """Weights and KV of the batch read once, in bfloat16."""
    c = SHAPES[shape]
    kv = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
    return 2e3 * (num_weights(shape) + batch * context * kv) / BYTES_PER_S


def prefill_bound(shape: str) -> float:
    """Tokens per second at the measured matrix rate, attention not counted: of the last layer only keys and values are
    needed of every token."""
    c = SHAPES[shape]
    beside_kv, kv = _layer_weights(shape)
    return FLOPS / (2 * (c["num_hidden_layers"] * (beside_kv + kv) - beside_kv))
