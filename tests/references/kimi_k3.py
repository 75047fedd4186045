"""Kimi K3 (text), written from its published configuration (moonshotai/Kimi-K3, text_config of model_type kimi_linear:
attn_res_block_size, routed_expert_hidden_size, latent_moe_use_norm, activation_situ_beta and _linear_beta,
mla_use_output_gate, linear_attn_config with use_full_rank_gate and gate_lower_bound) and its tensor names, without the
model file of the package: what a branch reads is attended to over the sums of blocks of layers.

One row at a time, whole; T tokens, E hidden size, H heads, D head_dim, C rank of the latent, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.plain import Tensors, attended, best, norm, of_layer, random_tensors, weighed

TEXT: dict[str, Any] = {
    **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 97},
    **{"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5, "hidden_act": "situ"},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    **{"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    **{"v_head_dim": 12, "mla_use_nope": True, "mla_use_output_gate": True},
    **{"num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 2},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "moe_layer_freq": 1},
    **{"moe_renormalize": True, "moe_router_activation_func": "sigmoid"},
    **{"routed_scaling_factor": 1.5, "num_expert_group": 1, "topk_group": 1},
    **{"routed_expert_hidden_size": 20, "latent_moe_use_norm": True, "attn_res_block_size": 2},
    **{"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
    "linear_attn_config": {
        **{"kda_layers": [1, 2, 4], "full_attn_layers": [3, 5], "num_heads": 4, "head_dim": 8},
        **{"short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0},
    },
    **{"max_position_embeddings": 128, "tie_word_embeddings": False},
}
CONFIG: dict[str, Any] = {
    **{"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"},
    "text_config": TEXT,
}
LATENT_EPS = 1e-6
"""Of norms of latents, and of lengths of queries and keys."""


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    text = config["text_config"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 48)}
    for layer in range(text["num_hidden_layers"]):
        own = {
            **(_linear_shapes() if layer + 1 in _linear(text) else _latent_shapes()),
            **{f"{name}.weight": (48,) for name in ("input_layernorm", "post_attention_layernorm")},
        }
        for name in ("self_attention_res", "mlp_res"):
            own |= {f"{name}_norm.weight": (48,), f"{name}_proj.weight": (1, 48)}
        own |= _mlp("mlp", 40) if layer < 1 else _experts_shapes(text)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes |= {"model.output_attn_res_norm.weight": (48,), "model.norm.weight": (48,)}
    shapes |= {"model.output_attn_res_proj.weight": (1, 48), "lm_head.weight": (97, 48)}
    return random_tensors({f"language_model.{name}": shape for name, shape in shapes.items()})


def _linear(text: dict[str, Any]) -> list[int]:
    kinds: list[int] = text["linear_attn_config"]["kda_layers"]
    return kinds


def _linear_shapes() -> dict[str, tuple[int, ...]]:
    """A_log has as many numbers as a head has dimensions; those of the heads come first."""
    at: dict[str, tuple[int, ...]] = {"A_log": (8,), "dt_bias": (32,), "o_norm.weight": (8,)}
    at |= {f"{one}_proj.weight": (32, 48) for one in "qkvg"}
    at |= {f"{one}_conv1d.weight": (32, 1, 4) for one in "qkv"}
    at |= {"f_a_proj.weight": (8, 48), "f_b_proj.weight": (32, 8), "b_proj.weight": (4, 48)}
    at["o_proj.weight"] = (48, 32)
    return {f"self_attn.{name}": shape for name, shape in at.items()}


def _latent_shapes() -> dict[str, tuple[int, ...]]:
    at = {"q_a_proj": (20, 48), "q_b_proj": (64, 20), "kv_a_proj_with_mqa": (30, 48)}
    at |= {"kv_b_proj": (88, 24), "g_proj": (48, 48), "o_proj": (48, 48)}
    at |= {"q_a_layernorm": (20,), "kv_a_layernorm": (24,)}
    return {f"self_attn.{name}.weight": shape for name, shape in at.items()}


def _mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        **{f"{name}.{one}_proj.weight": (inner, 48) for one in ("gate", "up")},
        f"{name}.down_proj.weight": (48, inner),
    }


def _experts_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    at: dict[str, tuple[int, ...]] = {
        **{"gate.weight": (6, 48), "gate.e_score_correction_bias": (6,)},
        **{"routed_expert_down_proj.weight": (20, 48), "routed_expert_norm.weight": (20,)},
        "routed_expert_up_proj.weight": (48, 20),
        **_mlp("shared_experts", 32),
    }
    for expert in range(text["num_experts"]):
        at |= {f"experts.{expert}.w{i}.weight": (16, 20) for i in (1, 3)}
        at[f"experts.{expert}.w2.weight"] = (20, 16)
    return {f"block_sparse_moe.{name}": shape for name, shape in at.items()}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    text = config["text_config"]
    eps, size = text["rms_norm_eps"], text["attn_res_block_size"]
    inside = of_layer(weights, "language_model.")
    partial_TE: torch.Tensor = inside["model.embed_tokens.weight"][row]
    blocks: list[torch.Tensor] = []

    def mixed(own: Tensors, name: str) -> torch.Tensor:
        stacked = torch.stack((*blocks, partial_TE))
        key_E = own[f"{name}_norm.weight"] * own[f"{name}_proj.weight"][0]
        weight = (norm(stacked, 1.0, eps) @ key_E).softmax(0)
        return torch.einsum("st,ste->te", weight, stacked)

    for layer in range(text["num_hidden_layers"]):
        own = of_layer(inside, f"model.layers.{layer}.")
        x_TE = mixed(own, "self_attention_res") if blocks else partial_TE
        mix = _delta if layer + 1 in _linear(text) else _latent
        y_TE = mix(text, own, norm(x_TE, own["input_layernorm.weight"], eps))
        if layer % size == 0:
            blocks.append(partial_TE)
            partial_TE = y_TE
        else:
            partial_TE = partial_TE + y_TE
        x_TE = norm(mixed(own, "mlp_res"), own["post_attention_layernorm.weight"], eps)
        sparse = "block_sparse_moe.gate.weight" in own
        partial_TE = partial_TE + (
            _experts(text, own, x_TE) if sparse else _dense(own, "mlp", x_TE)
        )
    x_TE = mixed(of_layer(inside, "model."), "output_attn_res")
    return norm(x_TE, inside["model.norm.weight"], eps) @ inside["lm_head.weight"].T


def _delta(text: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Kimi delta attention, a token at a time; what is kept is bounded below."""
    heads, dim = 4, text["linear_attn_config"]["head_dim"]
    at = of_layer(own, "self_attn.")

    def convolved(one: str) -> torch.Tensor:
        channels = F.pad((x_TE @ at[f"{one}_proj.weight"].T).T, (3, 0))
        y = F.conv1d(channels[None], at[f"{one}_conv1d.weight"], groups=heads * dim)[0]
        return F.silu(y).T.unflatten(1, (heads, dim))

    q, k, v = (convolved(one) for one in "qkv")
    q, k = (x * (x.square().sum(-1, keepdim=True) + LATENT_EPS).rsqrt() for x in (q, k))
    q = q * dim**-0.5
    a = (x_TE @ at["f_a_proj.weight"].T @ at["f_b_proj.weight"].T + at["dt_bias"]).unflatten(
        1, (heads, dim)
    )
    bound = text["linear_attn_config"]["gate_lower_bound"]
    kept = (bound * torch.sigmoid(at["A_log"][:heads, None].exp() * a)).exp()
    beta = (x_TE @ at["b_proj.weight"].T).sigmoid()
    gate = (x_TE @ at["g_proj.weight"].T).unflatten(1, (heads, dim)).sigmoid()
    y = norm(delta_rule(q, k, v, kept, beta), at["o_norm.weight"], text["rms_norm_eps"]) * gate
    return y.flatten(1) @ at["o_proj.weight"].T


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """[T, H, D], a token at a time."""
    state, rows = torch.zeros(*k.shape[1:], v.shape[2]), []
    for t in range(len(k)):
        state = state * kept[t, :, :, None]
        new = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + k[t, :, :, None] * new[:, None]
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(rows)


def _latent(text: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Latent attention that turns nothing, with a gate for each value."""
    at, heads = of_layer(own, "self_attn."), text["num_attention_heads"]
    nope, turned, values = (
        text[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q = norm(x_TE @ at["q_a_proj.weight"].T, at["q_a_layernorm.weight"], LATENT_EPS)
    q = (q @ at["q_b_proj.weight"].T).unflatten(1, (heads, nope + turned))
    latent, shared = (x_TE @ at["kv_a_proj_with_mqa.weight"].T).split((24, turned), 1)
    latent = norm(latent, at["kv_a_layernorm.weight"], LATENT_EPS)
    keys, v = (
        (latent @ at["kv_b_proj.weight"].T).unflatten(1, (heads, -1)).split((nope, values), -1)
    )
    k = torch.cat((keys, shared[:, None].expand(-1, heads, -1)), -1)
    y_TX = attended(q, k, v) * (x_TE @ at["g_proj.weight"].T).sigmoid()
    return y_TX @ at["o_proj.weight"].T


def _bounded(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


def _dense(own: Tensors, name: str, x_TE: torch.Tensor) -> torch.Tensor:
    gate, up, down = (own[f"{name}.{one}_proj.weight"] for one in ("gate", "up", "down"))
    return _bounded(x_TE @ gate.T, x_TE @ up.T) @ down.T


def _experts(text: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Over latents; the router reads the token itself."""
    at = of_layer(own, "block_sparse_moe.")
    score_TX = (x_TE @ at["gate.weight"].T).sigmoid()
    chosen_TX = best(score_TX + at["gate.e_score_correction_bias"] + 10, 2) > 0
    weight_TX = score_TX * chosen_TX
    weight_TX = weight_TX / weight_TX.sum(-1, keepdim=True) * text["routed_scaling_factor"]
    latent_TL = x_TE @ at["routed_expert_down_proj.weight"].T

    def expert(i: int) -> torch.Tensor:
        gate, down, up = (at[f"experts.{i}.w{one}.weight"] for one in (1, 2, 3))
        return _bounded(latent_TL @ gate.T, latent_TL @ up.T) @ down.T

    y_TL = norm(weighed(weight_TX, expert), at["routed_expert_norm.weight"], text["rms_norm_eps"])
    return y_TL @ at["routed_expert_up_proj.weight"].T + _dense(at, "shared_experts", x_TE)
