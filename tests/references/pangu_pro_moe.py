"""openPangu-Pro-MoE V2, written from the keys and tensor names that vLLM's class for it reads (param_sink_number,
param_sink_with_value, qk_nope_dim, qk_rope_dim, v_channels, interleaved_sliding_window, sandwich_norm): learned keys in
front of each text, normed as the others are, that every token sees."""

from __future__ import annotations

from typing import Any

import torch

from tests.references.mixture_parts import SIZES, checkpoint, experts, mlp_shapes, run
from tests.references.plain import Tensors, mlp, norm, of_layer, rotated, window

SINKS, TURNED, NOPE, VALUE = 5, 4, 8, 10
CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["PanguProMoEV2ForCausalLM"], "model_type": "PanguProMoEV2"},
    **{"qk_rope_dim": TURNED, "qk_nope_dim": NOPE, "v_channels": VALUE, "qkv_bias": False},
    **{"param_sink_number": SINKS, "param_sink_with_value": False, "attention_bias": False},
    **{"first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "router_enable_expert_bias": True, "sandwich_norm": True},
    **{"interleaved_sliding_window": [7, None], "num_nextn_predict_layers": 0},
}
del CONFIG["head_dim"]
VALUES = {
    **{**CONFIG, "param_sink_with_value": True, "qkv_bias": True, "sandwich_norm": False},
    **{"router_enable_expert_bias": False, "interleaved_sliding_window": None},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its names."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = {"q_proj": heads * (TURNED + NOPE), "k_proj": kv_heads * (TURNED + NOPE)}
    rows["v_proj"] = kv_heads * VALUE

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        at: dict[str, tuple[int, ...]] = {f"{name}.weight": (n, 48) for name, n in rows.items()}
        if config["qkv_bias"]:
            at |= {f"{name}.bias": (n,) for name, n in rows.items()}
        at |= {"o_proj.weight": (48, heads * VALUE), "k_layernorm.weight": (TURNED + NOPE,)}
        at["param_sink_key"] = (SINKS, kv_heads, TURNED + NOPE)
        if config["param_sink_with_value"]:
            at["param_sink_value"] = (SINKS, kv_heads, VALUE)
        shapes = {f"self_attn.{name}": shape for name, shape in at.items()}
        if config["sandwich_norm"]:
            shapes |= {f"{name}_mlp_layernorm.weight": (48,) for name in ("pre", "post")}
        if index < config["first_k_dense_replace"]:
            return shapes | mlp_shapes("mlp", config["intermediate_size"])
        shapes["mlp.gate.weight"] = (config["n_routed_experts"], 48)
        if config["router_enable_expert_bias"]:
            shapes["mlp.e_score_correction_bias"] = (config["n_routed_experts"],)
        for i in range(config["n_routed_experts"]):
            shapes |= mlp_shapes(f"mlp.experts.{i}", config["moe_intermediate_size"])
        return shapes | mlp_shapes("mlp.shared_experts", config["moe_intermediate_size"])

    return checkpoint(layer)


def attention(
    config: dict[str, Any], at: Tensors, x_TE: torch.Tensor, size: int | None
) -> torch.Tensor:
    """The learned ones stand first; a softmax over them and the text."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (
        (x_TE @ at[f"{one}_proj.weight"].T + at.get(f"{one}_proj.bias", 0.0)).unflatten(1, (n, -1))
        for one, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    theta, share, eps = config["rope_theta"], TURNED / (TURNED + NOPE), config["rms_norm_eps"]
    k = rotated(norm(k, at["k_layernorm.weight"], eps), theta, share=share)
    q = rotated(q, theta, share=share)
    first = norm(at["param_sink_key"], at["k_layernorm.weight"], eps)
    values = at.get("param_sink_value", v.new_zeros(SINKS, kv_heads, VALUE))
    group = heads // kv_heads
    k_XHD, v_XHD = (
        torch.cat(both).repeat_interleave(group, 1) for both in ((first, k), (values, v))
    )
    tokens = len(x_TE)
    sees = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    sees = sees if size is None else sees & window(tokens, size)
    sees = torch.cat((torch.ones(tokens, SINKS, dtype=torch.bool), sees), 1)
    scores = torch.einsum("thd,xhd->htx", q, k_XHD) * (TURNED + NOPE) ** -0.5
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return torch.einsum("htx,xhd->thd", weights, v_XHD).flatten(1) @ at["o_proj.weight"].T


def mixture(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """By sigmoid; a bias, if there is one, only chooses."""
    score_TX = (x_TE @ own["mlp.gate.weight"].T).sigmoid()
    biased_TX = score_TX + own.get("mlp.e_score_correction_bias", 0.0)
    best = biased_TX.topk(config["num_experts_per_tok"], -1).indices
    weight_TX = torch.zeros_like(score_TX).scatter(1, best, score_TX.gather(1, best))
    weight_TX = weight_TX / weight_TX.sum(-1, keepdim=True) * config["routed_scaling_factor"]
    return mlp(own, "mlp.shared_experts", x_TE) + experts(own, weight_TX, x_TE, "mlp.experts.{}")


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps, sandwich = config["rms_norm_eps"], config["sandwich_norm"]
    windows = config["interleaved_sliding_window"] or [None]

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        at, size = of_layer(own, "self_attn."), windows[index % len(windows)]
        y_TE, after = attention(config, at, h_TE, size), own["post_attention_layernorm.weight"]
        x_TE = x_TE + (norm(y_TE, after, eps) if sandwich else y_TE)
        h_TE = norm(x_TE, own["pre_mlp_layernorm.weight"] if sandwich else after, eps)
        dense = index < config["first_k_dense_replace"]
        y_TE = mlp(own, "mlp", h_TE) if dense else mixture(config, own, h_TE)
        return x_TE + (norm(y_TE, own["post_mlp_layernorm.weight"], eps) if sandwich else y_TE)

    return run(config, weights, row, layer)
