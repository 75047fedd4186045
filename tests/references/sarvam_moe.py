"""Sarvam with experts, written from its published configuration (sarvamai/sarvam-30b: model_type sarvam_moe,
use_qk_norm, first_k_dense_replace, num_experts, n_group, topk_group, routed_scaling_factor, num_shared_experts) and its
tensor names, without the model file of the package.

One row at a time, whole; T tokens, E hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    "architectures": ["SarvamMoEForCausalLM"],
    "model_type": "sarvam_moe",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "max_position_embeddings": 128,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}


def tensors(config: dict[str, Any], *, seed: int = 11) -> dict[str, torch.Tensor]:
    """A random checkpoint under its published names."""
    generator = torch.Generator().manual_seed(seed)
    width, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    made: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        noise = torch.randn(rows, columns, generator=generator)
        made[f"{name}.weight"] = noise * 1.2 / columns**0.5

    def vector(name: str, size: int, base: float) -> None:
        made[name] = base + 0.2 * torch.randn(size, generator=generator)

    def mlp(name: str, inner: int) -> None:
        matrix(f"{name}.gate_proj", inner, width)
        matrix(f"{name}.up_proj", inner, width)
        matrix(f"{name}.down_proj", width, inner)

    matrix("model.word_embeddings", config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        matrix(f"{at}.attention.query_key_value", (heads + 2 * kv_heads) * head, width)
        matrix(f"{at}.attention.dense", width, heads * head)
        for name in ("query_layernorm", "key_layernorm"):
            vector(f"{at}.attention.{name}.weight", head, 1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            vector(f"{at}.{name}.weight", width, 1.0)
        if layer < config["first_k_dense_replace"]:
            mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        matrix(f"{at}.mlp.gate", config["num_experts"], width)
        vector(f"{at}.mlp.gate.expert_bias", config["num_experts"], 0.0)
        for expert in range(config["num_experts"]):
            mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        shared = config["moe_intermediate_size"] * config["num_shared_experts"]
        mlp(f"{at}.mlp.shared_experts", shared)
    vector("model.norm.weight", width, 1.0)
    matrix("lm_head", config["vocab_size"], width)
    return made


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], row: list[int]
) -> torch.Tensor:
    """[T, V] of one row."""
    x_TE = weights["model.word_embeddings.weight"][torch.tensor(row)]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x_TE = x_TE + attention(config, own, norm(config, x_TE, own["input_layernorm.weight"]))
        h_TE = norm(config, x_TE, own["post_attention_layernorm.weight"])
        is_dense = layer < config["first_k_dense_replace"]
        x_TE = x_TE + (mlp(own, "mlp", h_TE) if is_dense else experts(config, own, h_TE))
    return norm(config, x_TE, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(config: dict[str, Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the root mean square."""
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


def rotated(config: dict[str, Any], x_THD: torch.Tensor) -> torch.Tensor:
    """By their places in the row, the first part of each head."""
    half = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
    speed = config["rope_theta"] ** (-torch.arange(half) / half)
    angle_T1D = (torch.arange(len(x_THD))[:, None] * speed)[:, None]
    first, second, rest = x_THD.tensor_split((half, 2 * half), -1)
    cos, sin = angle_T1D.cos(), angle_T1D.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def attention(
    config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor
) -> torch.Tensor:
    """Softmax attention, queries in groups."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    qkv = (x_TE @ own["attention.query_key_value.weight"].T).unflatten(1, (-1, config["head_dim"]))
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    q = rotated(config, norm(config, q, own["attention.query_layernorm.weight"]))
    k = rotated(config, norm(config, k, own["attention.key_layernorm.weight"]))
    y_TE = torch.zeros(len(x_TE), heads, config["head_dim"])
    for head in range(heads):
        of = head * kv_heads // heads
        scores = q[:, head] @ k[:, of].T / config["head_dim"] ** 0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        y_TE[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, of]
    return y_TE.flatten(1) @ own["attention.dense.weight"].T


def mlp(own: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """With a gate."""
    gate, up = (x @ own[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (F.silu(gate) * up) @ own[f"{name}.down_proj.weight"].T


def experts(
    config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor
) -> torch.Tensor:
    """The shared one, and those that the router chooses."""
    y_TE = mlp(own, "mlp.shared_experts", x_TE)
    scores = (x_TE @ own["mlp.gate.weight"].T).sigmoid()
    choice = scores + own["mlp.gate.expert_bias"]
    size = config["num_experts"] // config["n_group"]
    for token in range(len(x_TE)):
        worth = [
            choice[token, group * size : (group + 1) * size].topk(2).values.sum()
            for group in range(config["n_group"])
        ]
        kept = torch.tensor(worth).topk(config["topk_group"]).indices.tolist()
        within = [e for group in kept for e in range(group * size, (group + 1) * size)]
        best = sorted(within, key=lambda e: -float(choice[token, e]))[
            : config["num_experts_per_tok"]
        ]
        total = sum(float(scores[token, e]) for e in best)
        for expert in best:
            weight = float(scores[token, expert]) / total * config["routed_scaling_factor"]
            y_TE[token] += weight * mlp(own, f"mlp.experts.{expert}", x_TE[token])
    return y_TE
