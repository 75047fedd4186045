"""The shapes that are measured on one H200, their bars, and the physical floor of a decode step.

A folder with config.json is all that dummy weights need. The tokenizer of the server runs is made up too: every id
is some text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
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
    "qwen3-32b": _COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
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
    "qwen3-30b-a3b": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vocab_size": 201088,
    },
}
SHAPES["gpt-oss-120b"] = SHAPES["gpt-oss-20b"] | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
SHAPES["qwen3.5-9b"] = _COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
SHAPES["qwen3-8b-fp8"] = SHAPES["qwen3-8b-fp8-block"] = SHAPES["qwen3-8b"]
SHAPES["qwen3-8b-int4"] = SHAPES["qwen3-8b"]
SHAPES["qwen3-30b-a3b-fp8"] = SHAPES["qwen3-30b-a3b"]
QUANTIZATION = {
    "qwen3-8b-fp8": "fp8",
    "qwen3-8b-fp8-block": "fp8-block",
    "qwen3-8b-int4": "int4-g128",
    "qwen3-30b-a3b-fp8": "fp8",
    "gpt-oss-20b": "mxfp4",
    "gpt-oss-120b": "mxfp4",
}
"""Shape -> `--quantization`: linear layers in fewer bits, the head in bfloat16."""
EXPERTS_ALONE = ("gpt-oss-20b", "gpt-oss-120b")
"""Shapes of which only the experts are quantized."""
WEIGHT_BITS = {"fp8": 8, "fp8-block": 8 + 32 / 128, "int4-g128": 4 + 16 / 128, "mxfp4": 4.25}
RATES = {"fp8": 2, "fp8-block": 2}
"""What the tensor cores multiply in a second, in that of bfloat16."""
# (batch, prompt): ms a decode step may take
STEP_BARS: dict[str, dict[tuple[int, int], float | None]] = {
    "qwen3-8b": {
        (1, 128): 4.1,
        (8, 128): 4.4,
        (32, 128): 4.8,
        (128, 128): 6.7,
        (256, 128): 10.0,
        (256, 1024): 15.5,
    },
    "qwen3-32b": {},
    "qwen3-8b-fp8": {(1, 128): 2.4, (32, 128): 3.2, (256, 128): 7.0},
    "qwen3-8b-fp8-block": {},
    "qwen3-8b-int4": {(1, 128): 1.7, (32, 128): 2.7},
    "qwen3-0.6b": {(1, 128): 0.75, (32, 128): 1.0, (256, 128): 3.4},
    "qwen3-30b-a3b": {(1, 128): 2.2, (32, 128): 14.0, (256, 128): 18.5},
    "qwen3.5-9b": {(1, 128): None, (32, 128): None, (256, 128): None},
    "qwen3-30b-a3b-fp8": {(1, 128): 1.3, (32, 128): 7.4, (256, 128): 10.2},
    "gpt-oss-20b": {(1, 128): 1.3, (32, 128): 5.4},
    "gpt-oss-120b": {(1, 128): 1.8, (32, 128): 18.0},
    "deepseek-v2-lite": {(1, 128): 1.7, (32, 128): 8.1, (256, 128): 9.2},
}
PREFILL_BARS: dict[str, dict[tuple[int, int], int]] = {
    "qwen3-8b": {(1, 8192): 42_000, (16, 1024): 48_000},
    "qwen3-32b": {},
    "qwen3-8b-fp8": {(1, 8192): 61_000, (16, 1024): 72_000},
    "qwen3-8b-fp8-block": {(16, 1024): 60_000},
    "qwen3-8b-int4": {(1, 8192): 36_800, (16, 1024): 42_100},
    "qwen3-0.6b": {},
    "qwen3-30b-a3b": {(1, 8192): 70_000, (16, 1024): 88_000},
    "qwen3.5-9b": {},
    "qwen3-30b-a3b-fp8": {},
    "gpt-oss-20b": {},
    "gpt-oss-120b": {},
    "deepseek-v2-lite": {(1, 8192): 100_000, (16, 1024): 115_000},
}
OFFLINE_BARS = {
    "qwen3-8b": 7_600,
    "qwen3-8b-fp8": 9_200,
    "qwen3-8b-int4": 7_600,
    "qwen3-0.6b": 31_000,
    "qwen3-30b-a3b": 8_500,
    "qwen3-30b-a3b-fp8": 11_400,
    "gpt-oss-20b": 10_000,
    "deepseek-v2-lite": 15_000,
}


def device_name() -> dict[str, str]:
    """The GPU that a result was measured on, as one of its versions."""
    return {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


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


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Of one layer. `kv`: what makes keys and values (of a recurrent layer: its state); `rest`: all others that every
    token meets; `expert`: of one that is routed to (0: there are none)."""

    kv: int
    rest: int
    expert: int = 0


def layer_weights(shape: str) -> list[LayerWeights]:
    """Every layer's."""
    c = SHAPES[shape]
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        rank, rotary = c["kv_lora_rank"], c["qk_rope_head_dim"]
        nope, values = c["qk_nope_head_dim"], c["v_head_dim"]
        kv = width * (rank + rotary)
        rest = heads * (width * (nope + rotary + values) + rank * (nope + values))
    else:
        head_dim = c["head_dim"]
        kv, rest = width * 2 * c["num_key_value_heads"] * head_dim, width * 2 * heads * head_dim
    dense = LayerWeights(kv=kv, rest=rest + 3 * width * c["intermediate_size"])
    experts, _ = routing(shape)
    if "linear_num_key_heads" in c:
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        gated = replace(dense, rest=dense.rest + width * heads * head_dim)
        recurrent = LayerWeights(
            kv=width * (2 * keys + values + 2 * c["linear_num_value_heads"]),
            rest=2 * width * values + 3 * width * c["intermediate_size"],
        )
        return [gated if kind == "full_attention" else recurrent for kind in c["layer_types"]]
    if not experts:
        return [dense] * c["num_hidden_layers"]
    expert = 3 * width * c.get("moe_intermediate_size", c["intermediate_size"])
    shared = c.get("n_shared_experts", 0) * expert
    sparse = LayerWeights(kv=kv, rest=rest + shared + width * experts, expert=expert)
    first = c.get("first_k_dense_replace", 0)
    return [dense] * first + [sparse] * (c["num_hidden_layers"] - first)


def routing(shape: str) -> tuple[int, int]:
    """Experts that tokens are routed to, and how many a token takes; zeros: there are none."""
    c = SHAPES[shape]
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((c[name] for name in names if c.get(name)), 0)
    return int(experts), int(c.get("num_experts_per_tok", 0))


def cache_width(shape: str) -> int:
    """Elements of the KV cache of a token and a layer."""
    c = SHAPES[shape]
    if "kv_lora_rank" in c:
        return int(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    return int(2 * c["num_key_value_heads"] * c["head_dim"])


def caching_layers(shape: str) -> int:
    """Layers with a cache of keys and values."""
    kinds = SHAPES[shape].get("layer_types")
    return kinds.count("full_attention") if kinds else int(SHAPES[shape]["num_hidden_layers"])


def state_bytes(shape: str) -> int:
    """What a row reads and writes of recurrent state in a step, kept in float32 (the inputs of convolutions, a fiftieth
    of it, not counted)."""
    c = SHAPES[shape]
    layers = c.get("layer_types", []).count("linear_attention")
    if not layers:
        return 0
    heads, size = c["linear_num_value_heads"], c["linear_key_head_dim"] * c["linear_value_head_dim"]
    return int(2 * 4 * layers * heads * size)


def step_floor_ms(shape: str, *, batch: int, context: float, distinct: float = 0.0) -> float:
    """Weights, KV and states of the batch read once, in bfloat16 but for quantized weights; `distinct`: experts of a
    layer that the batch is routed to, on average."""
    c, layers = SHAPES[shape], layer_weights(shape)
    dense = float(sum(layer.kv + layer.rest for layer in layers))
    routed = distinct * sum(layer.expert for layer in layers)
    if shape in QUANTIZATION:
        share = WEIGHT_BITS[QUANTIZATION[shape]] / 16
        routed *= share
        dense *= share if shape not in EXPERTS_ALONE else 1
    weights = dense + routed
    weights += c["vocab_size"] * c["hidden_size"]  # not the embedding table, unless it is the head
    kv = caching_layers(shape) * cache_width(shape)
    moved = 2 * (weights + batch * context * kv) + batch * state_bytes(shape)
    return 1e3 * moved / BYTES_PER_S


def prefill_bound(shape: str) -> float:
    """Tokens per second at the measured matrix rate, attention not counted: of the last layer only keys and values are
    needed of every token."""
    _, chosen = routing(shape)
    layers = layer_weights(shape)
    met = sum(layer.kv + layer.rest + chosen * layer.expert for layer in layers[:-1])
    rate = FLOPS * RATES.get(QUANTIZATION.get(shape, ""), 1)
    return rate / (2 * (met + layers[-1].kv))
