"""Ring linear, written from its published configuration (inclusionAI/Ring-mini-linear-2.0: model_type
bailing_moe_linear, layer_group_size, group_norm_size, partial_rotary_factor, linear_silu) and its tensor names, without
the model file of the package. What it shares with Sarvam, which took over Ling's layers, is that reference's.

One row at a time, token by token; T tokens, E hidden size, H heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.references import sarvam_moe
from tests.references.sarvam_moe import attention, experts, mlp, norm, rotated

CONFIG: dict[str, Any] = {
    **sarvam_moe.CONFIG,
    "architectures": ["BailingMoeLinearV2ForCausalLM"],
    "model_type": "bailing_moe_linear",
    "num_hidden_layers": 5,
    "layer_group_size": 2,
    "group_norm_size": 3,
    "partial_rotary_factor": 0.5,
    "score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 24,
}
"""Layers 1, 3 and the last attend."""


def is_linear(config: dict[str, Any], layer: int) -> bool:
    """All but each group's last, and those that fill no group."""
    every = config["layer_group_size"]
    return (layer + 1) % every != 0 and layer < config["num_hidden_layers"] // every * every


def tensors(config: dict[str, Any], *, seed: int = 11) -> dict[str, torch.Tensor]:
    """A random checkpoint under its published names."""
    made = sarvam_moe.tensors(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    width, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        if not is_linear(config, layer):
            continue
        at = f"model.layers.{layer}.attention"
        for name, rows in (("query_key_value", 3 * inner), ("g_proj", inner)):
            noise = torch.randn(rows, width, generator=generator)
            made[f"{at}.{name}.weight"] = noise * 1.2 / width**0.5
        made[f"{at}.g_norm.weight"] = 1 + 0.2 * torch.randn(inner, generator=generator)
    return made


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], row: list[int]
) -> torch.Tensor:
    """[T, V] of one row."""
    x_TE = weights["model.word_embeddings.weight"][torch.tensor(row)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        own = {
            name.removeprefix(at): tensor for name, tensor in weights.items() if name.startswith(at)
        }
        h_TE = norm(config, x_TE, own["input_layernorm.weight"])
        if is_linear(config, layer):
            x_TE = x_TE + _lightning(config, own, h_TE, layer)
        else:
            x_TE = x_TE + attention(config, own, h_TE)
        h_TE = norm(config, x_TE, own["post_attention_layernorm.weight"])
        is_dense = layer < config["first_k_dense_replace"]
        x_TE = x_TE + (mlp(own, "mlp", h_TE) if is_dense else experts(config, own, h_TE))
    return norm(config, x_TE, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def slopes(heads: int) -> list[float]:
    """Of a number of heads that is a power of two 2^(-8 i / H); else those of the next smaller one, and then every
    other one of the next greater."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    less = 2 ** math.floor(math.log2(heads))
    return slopes(less) + slopes(2 * less)[::2][: heads - less]


def _lightning(
    config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor, layer: int
) -> torch.Tensor:
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    qkv = (x_TE @ own["attention.query_key_value.weight"].T).unflatten(1, (-1, head_dim))
    q, k, v = qkv.chunk(3, 1)
    q = rotated(config, norm(config, q, own["attention.query_layernorm.weight"]))
    k = rotated(config, norm(config, k, own["attention.key_layernorm.weight"]))
    less = 1 - (layer - 1) / (config["num_hidden_layers"] - 1) + 1e-5
    kept_H = torch.tensor([math.exp(-slope * less) for slope in slopes(heads)])
    state_HDD, y_THD = torch.zeros(heads, head_dim, head_dim), torch.zeros_like(q)
    for t in range(len(x_TE)):
        state_HDD = state_HDD * kept_H[:, None, None] + k[t][:, :, None] * v[t][:, None]
        y_THD[t] = torch.einsum("hk,hkv->hv", q[t] / head_dim**0.5, state_HDD)
    groups = y_THD.flatten(1).unflatten(1, (config["group_norm_size"], -1))
    normed = groups * (groups.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
    gate = (x_TE @ own["attention.g_proj.weight"].T).sigmoid()
    y = normed.flatten(1) * own["attention.g_norm.weight"] * gate
    return y @ own["attention.dense.weight"].T
