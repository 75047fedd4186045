"""Alice AI in plain PyTorch, written from the keys and tensor names that vLLM's class for its checkpoint reads: Kimi
delta attention and gated attention in turn, experts beside a gated shared one, and what a branch reads attended to over
the sums of blocks of layers.

One row at a time, whole; T tokens, E hidden size, H heads, D head_dim, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.kimi_k3 import delta_rule
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

E, HEADS, KV_HEADS, D, LAYERS, SIZE = 48, 4, 2, 12, 4, 2
KEYS, DIM, EPS = 4, 8, 1e-6
"""Heads of delta attention, and their size."""
CONFIG: dict[str, Any] = {
    **{"architectures": ["AliceAIForCausalLM"], "model_type": "alice_ai", "vocab_size": 97},
    **{"hidden_size": E, "intermediate_size": 80, "num_hidden_layers": LAYERS, "head_dim": D},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": EPS},
    **{"linear_num_key_heads": KEYS, "linear_num_value_heads": KEYS, "linear_key_head_dim": DIM},
    **{"linear_value_head_dim": DIM, "linear_conv_kernel_dim": 4, "full_attention_interval": 2},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "norm_topk_prob": True, "rope_theta": 500.0},
    **{"partial_rotary_factor": 0.5, "block_attn_res_block_size": SIZE},
    **{"max_position_embeddings": 128, "tie_word_embeddings": False},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its names; norms of layers are stored without 1."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, E)}
    for layer in range(LAYERS):
        own = {
            **(attention_shapes() if layer % 2 else _delta_shapes()),
            **{f"{name}.weight": (E,) for name in ("input_layernorm", "post_attention_layernorm")},
            **experts_shapes(),
        }
        for name in ("attn", "mlp") if layer else ("mlp",):
            own |= {f"{name}_res_proj.weight": (1, E), f"{name}_res_norm_weight": (E,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes |= {"model.attnres_final.res_proj.weight": (1, E), "model.norm.weight": (E,)}
    shapes |= {"model.attnres_final.res_norm_weight": (E,), "lm_head.weight": (97, E)}
    made = random_tensors(shapes)
    less = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    return {name: one - float(name.endswith(less)) for name, one in made.items()}


def _delta_shapes() -> dict[str, tuple[int, ...]]:
    rows = KEYS * DIM
    at: dict[str, tuple[int, ...]] = {"a_log_bias": (KEYS,), "dt_bias": (rows,)}
    at |= {f"{one}_proj.weight": (rows, E) for one in "qkv"}
    at |= {f"{one}_conv1d.weight": (rows, 1, 4) for one in "qkv"}
    at |= {f"{one}_a_proj.weight": (DIM, E) for one in "fg"}
    at |= {f"{one}_b_proj.weight": (rows, DIM) for one in "fg"}
    at |= {"b_proj.weight": (KEYS, E), "o_proj.weight": (E, rows), "o_norm.weight": (DIM,)}
    return {f"linear_attn.{name}": shape for name, shape in at.items()}


def attention_shapes() -> dict[str, tuple[int, ...]]:
    at: dict[str, tuple[int, ...]] = {"q_proj": (2 * HEADS * D, E), "o_proj": (E, HEADS * D)}
    at |= {f"{one}_proj": (KV_HEADS * D, E) for one in "kv"}
    at |= {f"{one}_norm": (D,) for one in "qk"}
    return {f"self_attn.{name}.weight": shape for name, shape in at.items()}


def experts_shapes() -> dict[str, tuple[int, ...]]:
    at: dict[str, tuple[int, ...]] = {"gate": (6, E), "shared_expert_gate": (1, E)}
    for name in (*(f"experts.{i}" for i in range(6)), "shared_expert"):
        at |= {f"{name}.{one}_proj": (16, E) for one in ("gate", "up")}
        at[f"{name}.down_proj"] = (E, 16)
    return {f"mlp.{name}.weight": shape for name, shape in at.items()}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    partial_TE: torch.Tensor | None = None
    blocks = [weights["model.embed_tokens.weight"][row]]

    def mixed(query_1E: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        stacked = torch.stack(blocks if partial_TE is None else [*blocks, partial_TE])
        share = (norm(stacked, weight_E, EPS) @ query_1E[0]).softmax(0)
        return torch.einsum("st,ste->te", share, stacked)

    def of(own: Tensors, name: str) -> torch.Tensor:
        return mixed(own[f"{name}_res_proj.weight"], own[f"{name}_res_norm_weight"])

    for layer in range(LAYERS):
        own = of_layer(weights, f"model.layers.{layer}.")
        if layer and layer % SIZE == 0:
            assert partial_TE is not None
            blocks.append(partial_TE)
            partial_TE = None
        x_TE = of(own, "attn") if layer else blocks[0]
        mix = attention if layer % 2 else _delta
        y_TE = mix(own, norm(x_TE, 1 + own["input_layernorm.weight"], EPS))
        partial_TE = y_TE if partial_TE is None else partial_TE + y_TE
        x_TE = norm(of(own, "mlp"), 1 + own["post_attention_layernorm.weight"], EPS)
        partial_TE = partial_TE + experts(of_layer(own, "mlp."), x_TE)
    last = of_layer(weights, "model.attnres_final.")
    x_TE = mixed(last["res_proj.weight"], last["res_norm_weight"])
    return norm(x_TE, 1 + weights["model.norm.weight"], EPS) @ weights["lm_head.weight"].T


def _delta(own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    at = of_layer(own, "linear_attn.")

    def convolved(one: str) -> torch.Tensor:
        channels = F.pad((x_TE @ at[f"{one}_proj.weight"].T).T, (3, 0))
        y = F.conv1d(channels[None], at[f"{one}_conv1d.weight"], groups=KEYS * DIM)[0]
        return F.silu(y).T.unflatten(1, (KEYS, DIM))

    def low_rank(one: str) -> torch.Tensor:
        return x_TE @ at[f"{one}_a_proj.weight"].T @ at[f"{one}_b_proj.weight"].T

    q, k, v = (convolved(one) for one in "qkv")
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    step = F.softplus(low_rank("f") + at["dt_bias"]).unflatten(1, (KEYS, DIM))
    kept = (-at["a_log_bias"][:, None].exp() * step).exp()
    beta = (x_TE @ at["b_proj.weight"].T).sigmoid()
    y = norm(delta_rule(q * DIM**-0.5, k, v, kept, beta), at["o_norm.weight"], EPS)
    y = y * low_rank("g").unflatten(1, (KEYS, DIM)).sigmoid()
    return y.flatten(1) @ at["o_proj.weight"].T


def attention(own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Half of a head turns; a gate for each query."""
    at = of_layer(own, "self_attn.")
    q, gate = (x_TE @ at["q_proj.weight"].T).unflatten(1, (HEADS, 2, D)).unbind(2)
    k, v = ((x_TE @ at[f"{one}_proj.weight"].T).unflatten(1, (KV_HEADS, D)) for one in "kv")
    q, k = (
        rotated(norm(x, 1 + at[f"{one}_norm.weight"], EPS), 500.0, share=0.5)
        for x, one in ((q, "q"), (k, "k"))
    )
    return (attended(q, k, v) * gate.flatten(1).sigmoid()) @ at["o_proj.weight"].T


def experts(at: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    weight_TX = best((x_TE @ at["gate.weight"].T).softmax(-1), 2)
    weight_TX = weight_TX / weight_TX.sum(-1, keepdim=True)
    shared = mlp(at, "shared_expert", x_TE) * (x_TE @ at["shared_expert_gate.weight"].T).sigmoid()
    return weighed(weight_TX, lambda i: mlp(at, f"experts.{i}", x_TE)) + shared
