"""Jet-Nemotron in plain PyTorch, written from its published configuration (jetlm_2B.json: efficient_attention_config,
layer_types), the paper (Gu et al. 2025, section 2.3) and the tensor names of its class: Qwen 2's attention, whole or in
windows, in some layers, else the gated delta rule behind a convolution of values whose taps follow from the token.

One row at a time, whole; T tokens, E hidden size, H heads, K key dimensions, V value dimensions, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.kimi_k3 import delta_rule
from tests.references.plain import (
    Tensors,
    attended,
    mlp,
    norm,
    of_layer,
    random_tensors,
    rotated,
    window,
)

E, H, K, V, W, RANK = 48, 4, 12, 32, 4, 32
CONFIG: dict[str, Any] = {
    **{"architectures": ["JetNemotronForCausalLM"], "model_type": "jet_nemotron"},
    **{"vocab_size": 97, "hidden_size": E, "intermediate_size": 40, "num_hidden_layers": 4},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_act": "silu"},
    **{"layer_types": ["jet", "attn", "swa", "jet"], "rms_norm_eps": 1e-6, "rope_theta": 500.0},
    "efficient_attention_config": {
        "jet": {
            **{"conv_size": W, "dconv_generator_reduction": 4, "dconv_implementation": "triton"},
            **{"expand_v": 2.6666666667, "head_dim": K, "mode": "chunk", "norm_eps": "1e-5"},
            "num_heads": H,
        },
        "swa": {"window_size": 11},
    },
    **{"max_position_embeddings": 128, "max_window_layers": 4, "use_mrope": False},
    **{"rope_scaling": None, "tie_word_embeddings": True},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, E)}
    for layer, kind in enumerate(config["layer_types"]):
        attention = _delta_shapes() if kind == "jet" else _attention_shapes()
        own = {f"self_attn.{name}": shape for name, shape in attention.items()}
        own |= {f"mlp.{one}_proj.weight": (40, E) for one in ("gate", "up")}
        own |= {"mlp.down_proj.weight": (E, 40), "input_layernorm.weight": (E,)}
        own["post_attention_layernorm.weight"] = (E,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return random_tensors(shapes | {"model.norm.weight": (E,)})


def _delta_shapes() -> dict[str, tuple[int, ...]]:
    at: dict[str, tuple[int, ...]] = {"A_log": (H,), "dt_bias": (H,), "o_norm.weight": (V,)}
    at |= {f"{one}_proj.weight": (H * K, E) for one in "qk"}
    at |= {f"{one}_proj.weight": (H * V, E) for one in "vg"}
    at |= {f"{one}_proj.weight": (H, E) for one in "ba"}
    at |= {"dynamic_conv1d.kernel_generator.w1.weight": (RANK, E), "o_proj.weight": (E, H * V)}
    at["dynamic_conv1d.kernel_generator.w2.weight"] = (H * V * W, RANK)
    return at | {"dynamic_conv1d.kernel_generator.w2.bias": (H * V * W,)}


def _attention_shapes() -> dict[str, tuple[int, ...]]:
    at: dict[str, tuple[int, ...]] = {"q_proj.weight": (48, E), "q_proj.bias": (48,)}
    at |= {f"{one}_proj.weight": (16, E) for one in "kv"}
    return at | {f"{one}_proj.bias": (16,) for one in "kv"} | {"o_proj.weight": (E, 48)}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    table = weights["model.embed_tokens.weight"]
    x_TE = table[torch.tensor(row)]
    for layer, kind in enumerate(config["layer_types"]):
        own = of_layer(weights, f"model.layers.{layer}.")
        at, y_TE = of_layer(own, "self_attn."), norm(x_TE, own["input_layernorm.weight"], 1e-6)
        x_TE = x_TE + (_delta(at, y_TE) if kind == "jet" else _attention(config, at, y_TE, kind))
        x_TE = x_TE + mlp(own, "mlp", norm(x_TE, own["post_attention_layernorm.weight"], 1e-6))
    return norm(x_TE, weights["model.norm.weight"], 1e-6) @ table.T


def _attention(config: dict[str, Any], at: Tensors, x_TE: torch.Tensor, kind: str) -> torch.Tensor:
    q, k, v = (
        (x_TE @ at[f"{one}_proj.weight"].T + at[f"{one}_proj.bias"]).unflatten(1, (-1, 8))
        for one in "qkv"
    )
    q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    size = config["efficient_attention_config"]["swa"]["window_size"]
    sees = window(len(x_TE), size) if kind == "swa" else None
    return attended(q, k, v, sees_HTT=sees) @ at["o_proj.weight"].T


def _delta(at: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    q, k, v, g, b, a = (x_TE @ at[f"{one}_proj.weight"].T for one in "qkvgba")
    q, k = (F.silu(one).unflatten(1, (H, K)) for one in (q, k))
    q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
    v = F.silu(_convolved(at, v, x_TE)).unflatten(1, (H, V))
    kept = (-at["A_log"].exp() * F.softplus(a + at["dt_bias"])).exp()
    y = delta_rule(q * K**-0.5, k, v, kept[:, :, None].expand(-1, -1, K), b.sigmoid())
    y = norm(y, at["o_norm.weight"], 1e-5) * F.silu(g).unflatten(1, (H, V))
    return y.flatten(1) @ at["o_proj.weight"].T


def _convolved(at: Tensors, v_TX: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
    """Tap W - 1 is the token's own."""
    inner = F.silu(x_TE @ at["dynamic_conv1d.kernel_generator.w1.weight"].T)
    generator = (at[f"dynamic_conv1d.kernel_generator.w2.{one}"] for one in ("weight", "bias"))
    taps_TXW = F.linear(inner, *generator).unflatten(1, (-1, W))
    padded = torch.cat((v_TX.new_zeros(W - 1, v_TX.shape[1]), v_TX))
    seen_TXW = torch.stack([padded[i : i + len(v_TX)] for i in range(W)], -1)
    return (seen_TXW * taps_TXW).sum(-1)
