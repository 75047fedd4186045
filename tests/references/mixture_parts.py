"""What references of decoders with experts share: shapes of their parts under the names of most checkpoints, Llama's
attention, routing, and the pass through layers that a function of each turns around. T tokens, E hidden size, X
experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.references.plain import (
    Shapes,
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

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500.0, "max_position_embeddings": 128},
    "tie_word_embeddings": False,
}
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
Own = dict[str, tuple[int, ...]]
Layer = Callable[[int, Tensors, torch.Tensor], torch.Tensor]


def mlp_shapes(name: str, inner: int, parts: tuple[str, str, str] = MLP, *, width: int = 48) -> Own:
    """Of a gated MLP."""
    gate, up, down = (f"{name}.{part}.weight" for part in parts)
    return {gate: (inner, width), up: (inner, width), down: (width, inner)}


def attention_shapes(*, heads: int = 6, kv_heads: int = 2, dim: int = 8) -> Own:
    """Of Llama's attention."""
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    shapes = {f"self_attn.{one}_proj.weight": (size, 48) for one, size in rows.items()}
    return {**shapes, "self_attn.o_proj.weight": (48, heads * dim)}


def checkpoint(layers: Callable[[int], Shapes], *, count: int = 3, tied: bool = False) -> Tensors:
    """A random checkpoint of layers of these shapes, each with two norms."""
    shapes: Own = {"model.embed_tokens.weight": (97, 48), "model.norm.weight": (48,)}
    if not tied:
        shapes["lm_head.weight"] = (97, 48)
    for layer in range(count):
        own = {**{f"{name}.weight": (48,) for name in NORMS}, **layers(layer)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return random_tensors(shapes)


def run(config: dict[str, Any], weights: Tensors, row: list[int], layer: Layer) -> torch.Tensor:
    """[T, V] of one row."""
    x_TE = weights["model.embed_tokens.weight"][row]
    for i in range(config["num_hidden_layers"]):
        x_TE = layer(i, of_layer(weights, f"model.layers.{i}."), x_TE)
    x_TE = norm(x_TE, weights["model.norm.weight"], config["rms_norm_eps"])
    return x_TE @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def attention(
    config: dict[str, Any],
    own: Tensors,
    x_TE: torch.Tensor,
    *,
    turns: bool = True,
    sees: torch.Tensor | None = None,
    normed: bool = False,
) -> torch.Tensor:
    """Llama's. `turns`: queries and keys are rotated; `normed`: each of their heads has a norm before."""
    at = of_layer(own, "self_attn.")
    q, k, v = (
        (x_TE @ at[f"{one}_proj.weight"].T).unflatten(1, (-1, config["head_dim"])) for one in "qkv"
    )
    if normed:
        eps = config["rms_norm_eps"]
        q, k = norm(q, at["q_norm.weight"], eps), norm(k, at["k_norm.weight"], eps)
    if turns:
        q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    return attended(q, k, v, sees_HTT=sees) @ at["o_proj.weight"].T


def chosen(score_TX: torch.Tensor, count: int, *, renormalize: bool = True) -> torch.Tensor:
    """The weights of the best experts, 0 for the others."""
    weight_TX = best(score_TX, count)
    return weight_TX / weight_TX.sum(-1, keepdim=True) if renormalize else weight_TX


def experts(own: Tensors, weight_TX: torch.Tensor, x_TE: torch.Tensor, name: str) -> torch.Tensor:
    """The weighed sum; {} in `name` is the expert's number."""
    return weighed(weight_TX, lambda i: mlp(own, name.format(i), x_TE))
