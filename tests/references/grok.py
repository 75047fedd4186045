"""Grok 2, written from its published configuration (xai-org/grok-2: residual_moe, attn_logit_softcapping,
router_logit_softcapping, final_logit_softcapping, attn_temperature_len, embedding_multiplier_scale,
output_multiplier_scale, rope_type original) and its tensor names with their shards joined; and Grok 1 (xai-org/grok-1,
model.py: softmax over all experts, no bound on their logits), without the model file of the package.

One row at a time, whole; T tokens, E hidden size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.references.plain import (
    Tensors,
    attended,
    best,
    mlp,
    norm,
    of_layer,
    random_tensors,
    rotated,
    weighed,
)

CONFIG: dict[str, Any] = {
    **{"architectures": ["Grok1ForCausalLM"], "model_type": "git", "vocab_size": 97},
    **{"hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24},
    **{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "residual_moe": True},
    **{"embedding_multiplier_scale": 6.5, "output_multiplier_scale": 0.5},
    **{"attn_logit_softcapping": 3.0, "router_logit_softcapping": 2.0},
    **{"final_logit_softcapping": 5, "attn_temperature_len": 16, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500.0, "rope_type": "original", "scaling_factor": 16.0},
    **{"original_max_position_embeddings": 64, "max_position_embeddings": 128},
    "tie_word_embeddings": False,
}
FIRST: dict[str, Any] = {
    **{"architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1", "vocab_size": 97},
    **{"hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 5},
    **{"num_experts_per_tok": 2, "attn_output_multiplier": 0.4, "max_attn_value": 3.0},
    **{"embedding_multiplier_scale": 6.5, "output_multiplier_scale": 0.6, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500.0, "max_position_embeddings": 128},
}
NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
GELU = partial(F.gelu, approximate="tanh")


def is_first(config: dict[str, Any]) -> bool:
    """Whether it is Grok 1."""
    return "num_experts" in config


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    first = is_first(config)
    attention, block = ("attn", "moe_block") if first else ("self_attn", "block_sparse_moe")
    gate, up, down = ("linear", "linear_v", "linear_1") if first else ("w1", "w3", "w2")
    ending = "scale" if first else "weight"
    inner = config["intermediate_size"] if first else config["moe_intermediate_size"]
    experts = config["num_experts"] if first else config["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 48)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, size in (("q", 48), ("k", 16), ("v", 16), ("o", 48)):
            shapes[f"{at}.{attention}.{name}_proj.weight"] = (size, 48)
        shapes |= {f"{at}.{name}.{ending}": (48,) for name in NORMS}
        shapes[f"{at}.{block}.gate.weight"] = (experts, 48)
        for expert in range(experts):
            own = f"{at}.{block}.experts.{expert}"
            shapes |= {f"{own}.{gate}.weight": (inner, 48), f"{own}.{up}.weight": (inner, 48)}
            shapes[f"{own}.{down}.weight"] = (48, inner)
        if not first:
            for part in ("gate_proj", "up_proj"):
                shapes[f"{at}.mlp.{part}.weight"] = (config["intermediate_size"], 48)
            shapes[f"{at}.mlp.down_proj.weight"] = (48, config["intermediate_size"])
    shapes[f"model.norm.{ending}"] = (48,)
    if not first:
        shapes["lm_head.weight"] = (97, 48)
    return random_tensors(shapes)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps, first = config["rms_norm_eps"], is_first(config)
    ending = "scale" if first else "weight"
    words = weights["model.embed_tokens.weight"]
    x_TE = words[row] * config["embedding_multiplier_scale"]
    for layer in range(config["num_hidden_layers"]):
        own = of_layer(weights, f"model.layers.{layer}.")
        before, behind, before_moe, behind_moe = (own[f"{name}.{ending}"] for name in NORMS)
        y_TE = _attention(config, own, norm(x_TE, before, eps))
        x_TE = x_TE + norm(y_TE, behind, eps)
        h_TE = norm(x_TE, before_moe, eps)
        y_TE = _experts(config, own, h_TE)
        if not first:
            y_TE = (mlp(own, "mlp", h_TE, act=GELU) + y_TE) / math.sqrt(2)
        x_TE = x_TE + norm(y_TE, behind_moe, eps)
    x_TE = norm(x_TE, weights[f"model.norm.{ending}"], eps)
    head = words if first else weights["lm_head.weight"]
    out = x_TE @ head.T * config["output_multiplier_scale"]
    cap = config.get("final_logit_softcapping")
    return out if cap is None else cap * (out / cap).tanh()


def _attention(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Scores are capped; behind so many positions they grow below their cap."""
    name = "attn" if is_first(config) else "self_attn"
    q, k, v = ((x_TE @ own[f"{name}.{one}_proj.weight"].T).unflatten(1, (-1, 8)) for one in "qkv")
    q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    cap = config.get("attn_logit_softcapping", config.get("max_attn_value"))
    growth_T1 = torch.ones(len(x_TE), 1)
    length = config.get("attn_temperature_len", -1)
    for place in range(len(x_TE)):
        if 0 < length < place:
            growth_T1[place] = math.log2(place) / math.log2(length)
    y_TX = attended(
        q,
        k,
        v,
        scale=config.get("attn_output_multiplier", 8**-0.5),
        change=lambda scores: cap * (scores / cap).tanh() * growth_T1,
    )
    return y_TX @ own[f"{name}.o_proj.weight"].T


def _experts(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """The best by a softmax over all, whose weights they keep."""
    first = is_first(config)
    block = "moe_block" if first else "block_sparse_moe"
    score_TX = x_TE @ own[f"{block}.gate.weight"].T
    if not first:
        cap = config["router_logit_softcapping"]
        score_TX = cap * (score_TX / cap).tanh()
    parts = ("linear", "linear_v", "linear_1") if first else ("w1", "w3", "w2")
    return weighed(
        best(score_TX.softmax(-1), config["num_experts_per_tok"]),
        lambda i: mlp(own, f"{block}.experts.{i}", x_TE, parts, GELU),
    )
