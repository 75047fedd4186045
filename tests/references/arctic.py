"""Arctic, written from its published configuration (Snowflake/snowflake-arctic-instruct: use_residual,
parallel_attn_mlp_res, moe_layer_frequency, num_local_experts, num_experts_per_tok) and its tensor names, without the
model file of the package: attention, then an MLP as wide as the layer; the experts read what the layer begins with.

One row at a time, whole; T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

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
    **{"architectures": ["ArcticForCausalLM"], "model_type": "arctic", "vocab_size": 97},
    **{"hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 4, "hidden_act": "silu"},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 6},
    **{"num_experts_per_tok": 2, "moe_layer_frequency": 2, "use_residual": True},
    **{"parallel_attn_mlp_res": True, "rms_norm_eps": 1e-5, "rope_theta": 500.0},
    **{"max_position_embeddings": 128, "tie_word_embeddings": False, "sliding_window": None},
}
PARTS = ("w1", "w3", "w2")


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether this layer has."""
    return (layer + 1) % config["moe_layer_frequency"] == 0


def _mlp_shapes(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}.weight": (48, inner) if part == "w2" else (inner, 48) for part in PARTS}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 48)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, size in (("q", 48), ("k", 16), ("v", 16), ("o", 48)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (size, 48)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (48,)
        block = f"{at}.block_sparse_moe"
        if not has_experts(config, layer):
            shapes |= _mlp_shapes(f"{block}.mlp", inner)
            continue
        shapes[f"{block}.gate.weight"] = (config["num_local_experts"], 48)
        for expert in range(config["num_local_experts"]):
            shapes |= _mlp_shapes(f"{block}.experts.{expert}", inner)
        shapes |= _mlp_shapes(f"{at}.residual_mlp", 48)
        shapes[f"{at}.residual_layernorm.weight"] = (48,)
    shapes |= {"model.norm.weight": (48,), "lm_head.weight": (97, 48)}
    return random_tensors(shapes)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]
    x_TE = weights["model.embed_tokens.weight"][row]
    for layer in range(config["num_hidden_layers"]):
        own = of_layer(weights, f"model.layers.{layer}.")
        begins_TE = x_TE
        x_TE = x_TE + _attention(config, own, norm(x_TE, own["input_layernorm.weight"], eps))
        of_experts = own["post_attention_layernorm.weight"]
        if has_experts(config, layer):
            h_TE = norm(x_TE, own["residual_layernorm.weight"], eps)
            y_TE = _experts(config, own, norm(begins_TE, of_experts, eps))
            x_TE = x_TE + mlp(own, "residual_mlp", h_TE, PARTS) + y_TE
        else:
            h_TE = norm(x_TE, of_experts, eps)
            x_TE = x_TE + mlp(own, "block_sparse_moe.mlp", h_TE, PARTS)
    return norm(x_TE, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _attention(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        (x_TE @ own[f"self_attn.{one}_proj.weight"].T).unflatten(1, (-1, 8)) for one in "qkv"
    )
    q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    return attended(q, k, v) @ own["self_attn.o_proj.weight"].T


def _experts(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """The weights of the chosen add up to 1."""
    score_TX = (x_TE @ own["block_sparse_moe.gate.weight"].T).softmax(-1)
    weight_TX = best(score_TX, config["num_experts_per_tok"])
    weight_TX = weight_TX / weight_TX.sum(-1, keepdim=True)
    return weighed(weight_TX, lambda i: mlp(own, f"block_sparse_moe.experts.{i}", x_TE, PARTS))
