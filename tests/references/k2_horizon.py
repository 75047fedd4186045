"""K2 Horizon, written from the configs and the tensor names of IFM's 375B (CONFIG), 36B (VALUES) and dense (DENSE)
checkpoints, with fewer and smaller layers: pairs are the halves of a whole head, of which the first turn; a bias of a
router only chooses; the 36B's values are sums of those of chosen experts, each behind silu."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.mixture_parts import (
    SIZES,
    attention_shapes,
    checkpoint,
    experts,
    mlp_shapes,
)
from tests.references.plain import Tensors, attended, mlp, norm, of_layer, weighed

CONFIG: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "rope_theta"},
    **{"architectures": ["K2HorizonForCausalLM"], "model_type": "k2_horizon"},
    **{"attention_bias": False, "attention_gate_func": None, "query_key_norm": False},
    **{"rope_head_dim": 4, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"num_shared_experts": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
    **{"moe_gate_bias": True, "router_score_func": "sigmoid", "router_scaling_factor": 2.5},
    **{"decoder_sparse_step": 1, "mova_num_experts": 0, "layernorm_num_groups": 1},
}


VALUES: dict[str, Any] = {
    **{**CONFIG, "rope_head_dim": 8, "layernorm_num_groups": 2, "attention_gate_func": "softplus"},
    **{"mova_num_experts": 26, "mova_num_experts_per_tok": 2},
}
DENSE: dict[str, Any] = {
    **{**CONFIG, "num_experts": 0, "layernorm_num_groups": 4, "mlp_only_layers": []},
    **{"rope_head_dim": None, "attention_gate_func": "silu", "tie_word_embeddings": True},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    count, inner = config["num_experts"], config["moe_intermediate_size"]

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = attention_shapes()
        if config["attention_gate_func"]:
            shapes["self_attn.gate_proj.weight"] = (48, 48)
        if not sparse(config, index):
            return shapes | mlp_shapes("mlp", config["intermediate_size"])
        for i in range(config["mova_num_experts"]):
            shapes[f"self_attn.v_experts.{i}.weight"] = shapes["self_attn.v_proj.weight"]
        if config["mova_num_experts"]:
            del shapes["self_attn.v_proj.weight"]
            shapes["self_attn.v_router.weight"] = (config["mova_num_experts"], 48)
            shapes["self_attn.v_router.bias"] = (config["mova_num_experts"],)
        shapes |= {"mlp.gate.weight": (count, 48), "mlp.gate.bias": (count,)}
        for i in range(count):
            shapes |= mlp_shapes(f"mlp.experts.{i}", inner)
        return shapes | mlp_shapes("mlp.shared_experts", inner * config["num_shared_experts"])

    return checkpoint(layer, tied=config["tie_word_embeddings"])


def sparse(config: dict[str, Any], index: int) -> bool:
    """Whether a layer has experts."""
    return config["num_experts"] > 0 and index not in config["mlp_only_layers"]


def turned(x_THD: torch.Tensor, theta: float, turning: int) -> torch.Tensor:
    """Pair i of a head is its dimensions i and i + D/2; the first `turning` / 2 of them turn."""
    half = x_THD.shape[-1] // 2
    speed = torch.zeros(half, dtype=x_THD.dtype)
    speed[: turning // 2] = theta ** (-2 * torch.arange(turning // 2, dtype=x_THD.dtype) / turning)
    angle_T1D = (torch.arange(len(x_THD))[:, None] * speed)[:, None]
    first, second = x_THD[..., :half], x_THD[..., half:]
    cos, sin = angle_T1D.cos(), angle_T1D.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def grouped(x_TE: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """A mean square for each group."""
    return norm(x_TE.unflatten(1, (groups, -1)), 1.0, eps).flatten(1) * weight


def routed(
    config: dict[str, Any], own: Tensors, name: str, x_TE: torch.Tensor, count: int
) -> torch.Tensor:
    """[T, X]: the weights, 0 of what is not chosen."""
    score_TX = (x_TE @ own[f"{name}.weight"].T).sigmoid()
    best = (score_TX + own[f"{name}.bias"]).topk(count, -1).indices
    weight_TX = torch.zeros_like(score_TX).scatter(1, best, score_TX.gather(1, best))
    return weight_TX / weight_TX.sum(-1, keepdim=True) * config["router_scaling_factor"]


def values(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """[T, V]."""
    if "self_attn.v_proj.weight" in own:
        return x_TE @ own["self_attn.v_proj.weight"].T
    weight_TX = routed(config, own, "self_attn.v_router", x_TE, config["mova_num_experts_per_tok"])
    return weighed(weight_TX, lambda i: F.silu(x_TE @ own[f"self_attn.v_experts.{i}.weight"].T))


GATES = {"silu": F.silu, "softplus": lambda x: torch.log2(1 + 2**x)}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps, dim, groups = config["rms_norm_eps"], config["head_dim"], config["layernorm_num_groups"]
    theta, turning = config["rope_parameters"]["rope_theta"], config["rope_head_dim"] or dim

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = grouped(x_TE, own["input_layernorm.weight"], eps, groups)
        q, k = (h_TE @ own[f"self_attn.{one}_proj.weight"].T for one in "qk")
        q, k, v = (x.unflatten(1, (-1, dim)) for x in (q, k, values(config, own, h_TE)))
        y_TX = attended(turned(q, theta, turning), turned(k, theta, turning), v)
        if config["attention_gate_func"]:
            gate = GATES[config["attention_gate_func"]]
            y_TX = y_TX * gate(h_TE @ own["self_attn.gate_proj.weight"].T)
        x_TE = x_TE + y_TX @ own["self_attn.o_proj.weight"].T
        h_TE = grouped(x_TE, own["post_attention_layernorm.weight"], eps, groups)
        if not sparse(config, index):
            return x_TE + mlp(own, "mlp", h_TE)
        weight_TX = routed(config, own, "mlp.gate", h_TE, config["num_experts_per_tok"])
        y_TE = experts(own, weight_TX, h_TE, "mlp.experts.{}")
        return x_TE + y_TE + mlp(own, "mlp.shared_experts", h_TE)

    x_TE = weights["model.embed_tokens.weight"][row]
    for i in range(config["num_hidden_layers"]):
        x_TE = layer(i, of_layer(weights, f"model.layers.{i}."), x_TE)
    x_TE = grouped(x_TE, weights["model.norm.weight"], eps, groups)
    return x_TE @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T
