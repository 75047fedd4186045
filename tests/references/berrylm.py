"""BerryLM in plain PyTorch, written from the keys and tensor names that SGLang's class for its checkpoint reads: the
gated delta rule with decays of channels, attention and experts as Alice AI's, and a residual that each layer mixes with
what it was at the ends of blocks.

One row at a time, whole; T tokens, E hidden size, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.alice_ai import CONFIG as ALIKE
from tests.references.alice_ai import (
    EPS,
    LAYERS,
    SIZE,
    E,
    attention,
    attention_shapes,
    experts,
    experts_shapes,
)
from tests.references.kimi_k3 import delta_rule
from tests.references.plain import Tensors, norm, of_layer, random_tensors

KEYS, VALUES, DIM, RANK = 2, 4, 8, 6
"""Heads of keys and of values."""
CONFIG: dict[str, Any] = {
    **{key: value for key, value in ALIKE.items() if key != "block_attn_res_block_size"},
    **{"architectures": ["BerryLMForCausalLM"], "model_type": "berrylm"},
    **{"linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES, "attn_res_gated": True},
    **{"attn_res_block_size": SIZE, "attn_res_eps": 1e-6, "kda_gate_bottleneck": RANK},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its names; norms of layers are stored without 1."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, E)}
    for layer in range(LAYERS):
        own = {
            **(attention_shapes() if layer % 2 else _delta_shapes()),
            **{f"{name}.weight": (E,) for name in ("input_layernorm", "post_attention_layernorm")},
            **{**experts_shapes(), "attn_res.pseudo_query": (E,), "attn_res.gate": ()},
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    made = random_tensors(shapes | {"model.norm.weight": (E,), "lm_head.weight": (97, E)})
    less = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    gates = {name: one * 3 + 0.7 for name, one in made.items() if name.endswith("res.gate")}
    return {name: one - float(name.endswith(less)) for name, one in made.items()} | gates


def _delta_shapes() -> dict[str, tuple[int, ...]]:
    channels = (2 * KEYS + VALUES) * DIM
    at: dict[str, tuple[int, ...]] = {"A_log": (VALUES,), "dt_bias": (VALUES * DIM,)}
    at |= {"in_proj_qkv.weight": (channels, E), "conv1d.weight": (channels, 1, 4)}
    at |= {"in_proj_z.weight": (VALUES * DIM, E), "in_proj_b.weight": (VALUES, E)}
    at |= {"f_down_proj.weight": (RANK, E), "f_up_proj.weight": (VALUES * DIM, RANK)}
    at |= {"norm.weight": (DIM,), "out_proj.weight": (E, VALUES * DIM)}
    return {f"linear_attn.{name}": shape for name, shape in at.items()}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    x_TE = weights["model.embed_tokens.weight"][row]
    ends = [x_TE]
    for layer in range(LAYERS):
        own = of_layer(weights, f"model.layers.{layer}.")
        stacked = torch.stack((*ends, x_TE))
        share = (norm(stacked, 1.0, config["attn_res_eps"]) @ own["attn_res.pseudo_query"]).softmax(
            0
        )
        mixed_TE = torch.einsum("st,ste->te", share, stacked)
        x_TE = x_TE + own["attn_res.gate"].tanh() * (mixed_TE - x_TE)
        mix = attention if layer % 2 else _delta
        x_TE = x_TE + mix(own, norm(x_TE, 1 + own["input_layernorm.weight"], EPS))
        h_TE = norm(x_TE, 1 + own["post_attention_layernorm.weight"], EPS)
        x_TE = x_TE + experts(of_layer(own, "mlp."), h_TE)
        if (layer + 1) % SIZE == 0:
            ends.append(x_TE)
    return norm(x_TE, 1 + weights["model.norm.weight"], EPS) @ weights["lm_head.weight"].T


def _delta(own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Each key head serves two value heads, which have decays of their own."""
    at = of_layer(own, "linear_attn.")
    channels = F.pad((x_TE @ at["in_proj_qkv.weight"].T).T, (3, 0))[None]
    qkv = F.silu(F.conv1d(channels, at["conv1d.weight"], groups=channels.shape[1])[0]).T
    q, k, v = qkv.unflatten(1, (-1, DIM)).split((KEYS, KEYS, VALUES), 1)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(VALUES // KEYS, 1) for x in (q * DIM**-0.5, k))
    low = x_TE @ at["f_down_proj.weight"].T @ at["f_up_proj.weight"].T
    step = F.softplus(low + at["dt_bias"]).unflatten(1, (VALUES, DIM))
    kept = (-at["A_log"][:, None].exp() * step).exp()
    y = delta_rule(q, k, v, kept, (x_TE @ at["in_proj_b.weight"].T).sigmoid())
    gate = F.silu(x_TE @ at["in_proj_z.weight"].T).unflatten(1, (VALUES, DIM))
    return (norm(y, at["norm.weight"], EPS) * gate).flatten(1) @ at["out_proj.weight"].T
