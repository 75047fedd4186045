"""Ling 3 under its published name, written from its configuration (inclusionAI/Ling-3.0-tiny: layer_group_size,
kda_lower_bound, gated_attention_proj_granularity_type, expert_swiglu_limit_list, q_lora_rank) and its tensor names:
Kimi delta attention as that reference's, with one matrix for its gate and one for its decay, and in each group's last
layer DeepSeek's latent attention as Pangu's reference has it, with gates.

One row at a time, whole; T tokens, E hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.kimi_k3 import delta_rule
from tests.references.mixture_parts import SIZES, chosen, mlp_shapes
from tests.references.pangu_ultra_moe import latent_heads
from tests.references.plain import Tensors, norm, of_layer, random_tensors, weighed

CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"},
    **{"num_hidden_layers": 5, "layer_group_size": 3, "num_key_value_heads": 6, "head_dim": 8},
    **{"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    **{"v_head_dim": 12, "gated_attention_proj_granularity_type": "head_wise"},
    **{"short_conv_kernel_size": 4, "no_kda_lora": True, "kda_safe_gate": True},
    **{"kda_lower_bound": -5, "first_k_dense_replace": 1, "num_experts": 8},
    **{"num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_shared_experts": 1},
    **{"moe_shared_expert_intermediate_size": 32, "n_group": 4, "topk_group": 2},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid"},
    **{"rms_norm_eps": 1e-6, "use_mla_nope": False, "rope_interleave": True},
    **{"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None},
}
"""Layers 2, 3 and 4 attend: the last two fill no group."""
OTHERS: dict[str, Any] = {
    **{**CONFIG, "gated_attention_proj_granularity_type": "element_wise"},
    **{"expert_swiglu_limit_list": [0, 0.3, 0.0, 0.5, None]},
    **{"share_expert_swiglu_limit_list": [0, 0, 0.2, 0.4, 0]},
}


def attends(config: dict[str, Any], layer: int) -> bool:
    """By latents."""
    every = config["layer_group_size"]
    return (layer + 1) % every == 0 or layer >= config["num_hidden_layers"] // every * every


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    values = config["gated_attention_proj_granularity_type"] == "element_wise"
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (97, 48)}
    shapes |= {"model.norm.weight": (48,), "lm_head.weight": (97, 48)}
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (48,),
            "post_attention_layernorm.weight": (48,),
        }
        if attends(config, layer):
            rows = {"q_a_proj": (20, 48), "q_a_layernorm": (20,), "q_b_proj": (96, 20)}
            rows |= {"kv_a_proj_with_mqa": (30, 48), "kv_a_layernorm": (24,)}
            rows |= {"kv_b_proj": (132, 24), "dense": (48, 72)}
            rows["g_proj"] = (72 if values else 6, 48)
        else:
            rows = {f"{one}_proj": (48, 48) for one in "qkvgfo"} | {"b_proj": (6, 48)}
            rows |= {f"{one}_conv1d": (48, 1, 4) for one in "qkv"} | {"o_norm": (8,)}
            own |= {"attention.A_log": (6,), "attention.dt_bias": (48,)}
        own |= {f"attention.{name}.weight": shape for name, shape in rows.items()}
        if layer < config["first_k_dense_replace"]:
            own |= mlp_shapes("mlp", config["intermediate_size"])
        else:
            own |= {"mlp.gate.weight": (8, 48), "mlp.gate.expert_bias": (8,)}
            own |= mlp_shapes("mlp.shared_experts", 32)
            for i in range(8):
                own |= mlp_shapes(f"mlp.experts.{i}", 16)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return random_tensors(shapes)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]
    x_TE = weights["model.word_embeddings.weight"][row]
    for layer in range(config["num_hidden_layers"]):
        own = of_layer(weights, f"model.layers.{layer}.")
        mix = _latent if attends(config, layer) else _delta
        at = of_layer(own, "attention.")
        x_TE = x_TE + mix(config, at, norm(x_TE, own["input_layernorm.weight"], eps))
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        if layer < config["first_k_dense_replace"]:
            x_TE = x_TE + _mlp(own, "mlp", h_TE, 0.0)
        else:
            x_TE = x_TE + _experts(config, own, h_TE, layer)
    return norm(x_TE, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _delta(config: dict[str, Any], at: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    heads, dim = config["num_attention_heads"], config["head_dim"]

    def convolved(one: str) -> torch.Tensor:
        channels = F.pad((x_TE @ at[f"{one}_proj.weight"].T).T, (3, 0))
        y = F.conv1d(channels[None], at[f"{one}_conv1d.weight"], groups=heads * dim)[0]
        return F.silu(y).T.unflatten(1, (heads, dim))

    q, k, v = (convolved(one) for one in "qkv")
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    a = (x_TE @ at["f_proj.weight"].T + at["dt_bias"]).unflatten(1, (heads, dim))
    kept = (config["kda_lower_bound"] * torch.sigmoid(at["A_log"][:, None].exp() * a)).exp()
    beta = (x_TE @ at["b_proj.weight"].T).sigmoid()
    gate = (x_TE @ at["g_proj.weight"].T).unflatten(1, (heads, dim)).sigmoid()
    y = delta_rule(q * dim**-0.5, k, v, kept, beta)
    y = norm(y, at["o_norm.weight"], config["rms_norm_eps"]) * gate
    return y.flatten(1) @ at["o_proj.weight"].T


def _latent(config: dict[str, Any], at: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    sizes = (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"])
    y_TX = latent_heads(config, at, x_TE, sizes)
    gate = (x_TE @ at["g_proj.weight"].T).sigmoid()
    y_TX = (y_TX.unflatten(1, (gate.shape[1], -1)) * gate[..., None]).flatten(1)
    return y_TX @ at["dense.weight"].T


def _mlp(own: Tensors, name: str, x_TE: torch.Tensor, bound: float) -> torch.Tensor:
    gate, up, down = (own[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    gated, upper = F.silu(x_TE @ gate.T), x_TE @ up.T
    if bound:
        gated, upper = gated.clamp(max=bound), upper.clamp(-bound, bound)
    return (gated * upper) @ down.T


def _experts(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor, layer: int) -> torch.Tensor:
    """As DeepSeek-V3 routes: of the groups those whose best two are best."""
    bound, shared = (
        (config[f"{one}_swiglu_limit_list"] or [0] * 9)[layer] or 0.0
        for one in ("expert", "share_expert")
    )
    score_TX = (x_TE @ own["mlp.gate.weight"].T).sigmoid()
    choice_TGX = (score_TX + own["mlp.gate.expert_bias"]).unflatten(1, (config["n_group"], -1))
    worth_TG = choice_TGX.topk(2, -1).values.sum(-1)
    kept_TG = torch.zeros_like(worth_TG).scatter(1, worth_TG.topk(config["topk_group"]).indices, 1)
    choice_TX = ((choice_TGX + 10) * kept_TG[..., None]).flatten(1)
    chosen_TX = chosen(choice_TX, config["num_experts_per_tok"]) > 0
    weight_TX = score_TX * chosen_TX
    weight_TX = weight_TX / weight_TX.sum(-1, keepdim=True) * config["routed_scaling_factor"]
    y_TE = weighed(weight_TX, lambda i: _mlp(own, f"mlp.experts.{i}", x_TE, bound))
    return y_TE + _mlp(own, "mlp.shared_experts", x_TE, shared)
