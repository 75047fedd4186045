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
LATENT: dict[str, Any] = {
    **CONFIG,
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
"""As Ring-2.5-1T's config has it (q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim): layers
that attend do so by latents, as DeepSeek V3's, of which neighbours are rotated in pairs."""


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
        at = f"model.layers.{layer}.attention"
        if not is_linear(config, layer):
            if "kv_lora_rank" in config:
                made = {name: of for name, of in made.items() if not name.startswith(f"{at}.")}
                made |= _latent_tensors(config, at, generator)
            continue
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
            attend = latent_attention if "kv_lora_rank" in config else attention
            x_TE = x_TE + attend(config, own, h_TE)
        h_TE = norm(config, x_TE, own["post_attention_layernorm.weight"])
        is_dense = layer < config["first_k_dense_replace"]
        x_TE = x_TE + (mlp(own, "mlp", h_TE) if is_dense else experts(config, own, h_TE))
    return norm(config, x_TE, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _latent_tensors(
    config: dict[str, Any], at: str, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, values = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    sizes = {
        "q_a_proj": (q_rank, width),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (rank + rope, width),
        "kv_b_proj": (heads * (nope + values), rank),
        "dense": (width, heads * values),
    }
    made = {
        f"{at}.{name}.weight": torch.randn(*size, generator=generator) * 1.2 / size[1] ** 0.5
        for name, size in sizes.items()
    }
    for name, size in (("q_a_layernorm", q_rank), ("kv_a_layernorm", rank)):
        made[f"{at}.{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    return made


def latent_attention(
    config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor
) -> torch.Tensor:
    """Expanded: keys and values of every head are made of the latents."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ own[f"attention.{name}.weight"].T

    q = norm(config, project("q_a_proj", x_TE), own["attention.q_a_layernorm.weight"])
    q = project("q_b_proj", q).unflatten(1, (heads, -1))
    latent, k_rope = project("kv_a_proj_with_mqa", x_TE).split((rank, rope), 1)
    latent = norm(config, latent, own["attention.kv_a_layernorm.weight"])
    kv = project("kv_b_proj", latent).unflatten(1, (heads, -1))
    k_rope = _pairs_rotated(config, k_rope[:, None]).expand(-1, heads, -1)
    q = torch.cat((q[..., :nope], _pairs_rotated(config, q[..., nope:])), -1)
    k = torch.cat((kv[..., :nope], k_rope), -1)
    scores = torch.einsum("thd,shd->hts", q, k) / (nope + rope) ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    share = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return project("dense", torch.einsum("hts,shd->thd", share, kv[..., nope:]).flatten(1))


def _pairs_rotated(config: dict[str, Any], x_THR: torch.Tensor) -> torch.Tensor:
    """Each pair of neighbours as a complex number, turned by its place in the row."""
    half = x_THR.shape[-1] // 2
    speed = config["rope_theta"] ** (-torch.arange(half) / half)
    angle = (torch.arange(len(x_THR))[:, None] * speed)[:, None]
    pairs = torch.view_as_complex(x_THR.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


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
