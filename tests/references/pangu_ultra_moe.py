"""openPangu-Ultra-MoE, written from its published configuration and tensor names
(FreedomIntelligence/openPangu-Ultra-MoE-718B: attention_kv_lora_dim, attention_qk_rope_dim, num_dense_layers,
sandwich_norm): DeepSeek's latent attention, experts by sigmoid without a bias, a norm before and behind each branch."""

from __future__ import annotations

from typing import Any

import torch

from tests.references.mixture_parts import SIZES, checkpoint, chosen, experts, mlp_shapes, run
from tests.references.plain import Tensors, attended, mlp, norm, of_layer, rotated

CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe"},
    **{"num_key_value_heads": 6, "attention_q_lora_dim": 20, "attention_kv_lora_dim": 24},
    **{"attention_qk_dim": 10, "attention_qk_rope_dim": 6, "attention_v_dim": 12},
    **{"num_dense_layers": 1, "num_routed_experts": 6, "num_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "sandwich_norm": True, "num_mtp_layers": 0},
}
del CONFIG["head_dim"]
LATENT_EPS = 1e-6


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    rows = {"q_a_proj": (20, 48), "q_a_layernorm": (20,), "q_b_proj": (96, 20)}
    rows |= {"kv_a_proj_with_mqa": (30, 48), "kv_a_layernorm": (24,), "kv_b_proj": (132, 24)}
    rows["o_proj"] = (48, 72)

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = {f"self_attn.{name}.weight": shape for name, shape in rows.items()}
        shapes |= {f"{name}_mlp_layernorm.weight": (48,) for name in ("pre", "post")}
        if index < config["num_dense_layers"]:
            return shapes | mlp_shapes("mlp", config["intermediate_size"])
        shapes["mlp.gate.weight"] = (config["num_routed_experts"], 48)
        for i in range(config["num_routed_experts"]):
            shapes |= mlp_shapes(f"mlp.experts.{i}", config["moe_intermediate_size"])
        return shapes | mlp_shapes("mlp.shared_experts", config["moe_intermediate_size"])

    return checkpoint(layer)


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Neighbours, which turn together, as the halves of the last dimension."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def latent_heads(
    config: dict[str, Any], at: Tensors, x_TE: torch.Tensor, sizes: tuple[int, int, int]
) -> torch.Tensor:
    """What the heads of DeepSeek's latent attention give. `sizes`: of a key, of what is rotated beside it, of a
    value."""
    heads, (keys, turned, values) = config["num_attention_heads"], sizes
    q = norm(x_TE @ at["q_a_proj.weight"].T, at["q_a_layernorm.weight"], LATENT_EPS)
    q = (q @ at["q_b_proj.weight"].T).unflatten(1, (heads, -1))
    latent, shared = (x_TE @ at["kv_a_proj_with_mqa.weight"].T).tensor_split((-turned,), 1)
    latent = norm(latent, at["kv_a_layernorm.weight"], LATENT_EPS)
    k, v = (latent @ at["kv_b_proj.weight"].T).unflatten(1, (heads, -1)).split((keys, values), -1)
    theta = config["rope_theta"]
    shared = rotated(in_halves(shared)[:, None], theta).expand(-1, heads, -1)
    q = torch.cat((q[..., :keys], rotated(in_halves(q[..., keys:]), theta)), -1)
    return attended(q, torch.cat((k, shared), -1), v)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]
    key, turned, value = (config[f"attention_{one}_dim"] for one in ("qk", "qk_rope", "v"))
    sizes = (key, turned, value)

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        at = of_layer(own, "self_attn.")
        y_TE = latent_heads(config, at, h_TE, sizes) @ at["o_proj.weight"].T
        x_TE = x_TE + norm(y_TE, own["post_attention_layernorm.weight"], eps)
        h_TE = norm(x_TE, own["pre_mlp_layernorm.weight"], eps)
        if index < config["num_dense_layers"]:
            y_TE = mlp(own, "mlp", h_TE)
        else:
            score_TX = (h_TE @ own["mlp.gate.weight"].T).sigmoid()
            weight_TX = chosen(score_TX, config["num_experts_per_tok"])
            y_TE = mlp(own, "mlp.shared_experts", h_TE)
            scaled_TX = weight_TX * config["routed_scaling_factor"]
            y_TE = y_TE + experts(own, scaled_TX, h_TE, "mlp.experts.{}")
        return x_TE + norm(y_TE, own["post_mlp_layernorm.weight"], eps)

    return run(config, weights, row, layer)
