"""PLaMo 3, written from its published configuration (pfnet/plamo-3-nict-2b-base: sliding_window as a list, one of
eight layers null, rope_theta and rope_local_theta) and its tensor names, without the model file of the package: stored
norms lack 1, behind the mixer 1/5, behind the MLP 5 ** -1.5.

One row at a time, whole; T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.plain import (
    Tensors,
    attended,
    norm,
    of_layer,
    random_tensors,
    rotated,
    window,
)

CONFIG: dict[str, Any] = {
    **{"architectures": ["Plamo3ForCausalLM"], "model_type": "plamo3", "vocab_size": 97},
    **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "head_dim": 8},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6},
    **{"sliding_window": [12, None, 12], "sliding_window_pattern": 2, "rope_theta": 700.0},
    **{"rope_local_theta": 50.0, "max_position_embeddings": 128, "tie_word_embeddings": False},
}
OFFSETS = {
    "pre_mixer_norm": 1.0,
    "post_mixer_norm": 1 / 5,
    "pre_mlp_norm": 1.0,
    "post_mlp_norm": 1 / 5**1.5,
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 48)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.layers.{layer}"
        shapes |= {f"{at}.mixer.qkv_proj.weight": (80, 48), f"{at}.mixer.o_proj.weight": (48, 48)}
        shapes |= {f"{at}.mixer.{one}_norm.weight": (8,) for one in "qk"}
        shapes |= {f"{at}.{name}.weight": (48,) for name in OFFSETS}
        inner = config["intermediate_size"]
        shapes[f"{at}.mlp.gate_up_proj.weight"] = (2 * inner, 48)
        shapes[f"{at}.mlp.down_proj.weight"] = (48, inner)
    shapes |= {"model.norm.weight": (48,), "lm_head.weight": (97, 48)}
    made = random_tensors(shapes)
    return {name: tensor - float("norm" in name) for name, tensor in made.items()}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]
    x_TE = weights["model.embed_tokens.weight"][row]
    for layer, seen in enumerate(config["sliding_window"]):
        own = of_layer(weights, f"model.layers.layers.{layer}.")

        def normed(x: torch.Tensor, name: str, own: Tensors = own) -> torch.Tensor:
            return norm(x, own[f"{name}.weight"] + OFFSETS.get(name, 1.0), eps)

        qkv = (normed(x_TE, "pre_mixer_norm") @ own["mixer.qkv_proj.weight"].T).unflatten(
            1, (-1, 8)
        )
        q, k, v = qkv.split((6, 2, 2), 1)
        theta = config["rope_theta"] if seen is None else config["rope_local_theta"]
        q, k = (rotated(normed(x, f"mixer.{one}_norm"), theta) for x, one in ((q, "q"), (k, "k")))
        sees = None if seen is None else window(len(row), seen)
        y_TE = attended(q, k, v, sees_HTT=sees) @ own["mixer.o_proj.weight"].T
        x_TE = x_TE + normed(y_TE, "post_mixer_norm")
        gate, up = (normed(x_TE, "pre_mlp_norm") @ own["mlp.gate_up_proj.weight"].T).chunk(2, -1)
        y_TE = (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T
        x_TE = x_TE + normed(y_TE, "post_mlp_norm")
    x_TE = norm(x_TE, weights["model.norm.weight"] + 1, eps)
    return x_TE @ weights["lm_head.weight"].T
