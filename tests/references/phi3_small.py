"""Phi-3-small, written from its published configuration (microsoft/Phi-3-small-8k-instruct: blocksparse_block_size,
blocksparse_num_local_blocks, blocksparse_vert_stride, blocksparse_homo_head_pattern, dense_attention_every_n_layers,
gegelu_limit, mup_use_scaling, mup_attn_multiplier, mup_embedding_multiplier, mup_width_multiplier,
rope_embedding_base, rope_position_scale, dummy_token_indices) and the technical report (Abdin et al. 2024), without the
model file of the package.

One row at a time, whole; T tokens, E hidden size, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.plain import Tensors, attended, of_layer, random_tensors, rotated

CONFIG: dict[str, Any] = {
    **{"architectures": ["Phi3SmallForCausalLM"], "model_type": "phi3small", "vocab_size": 97},
    **{"hidden_size": 32, "ff_intermediate_size": 24, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "gegelu"},
    **{"layer_norm_epsilon": 1e-5, "gegelu_limit": 0.7, "dense_attention_every_n_layers": 2},
    **{"blocksparse_block_size": 4, "blocksparse_num_local_blocks": 2},
    **{"blocksparse_vert_stride": 3, "blocksparse_homo_head_pattern": False},
    **{"mup_use_scaling": True, "mup_attn_multiplier": 2.0, "mup_embedding_multiplier": 3.0},
    **{"mup_width_multiplier": 1.5, "rope_embedding_base": 1000.0, "rope_position_scale": 1.6},
    **{"max_position_embeddings": 128, "dummy_token_indices": []},
}
ALIKE: dict[str, Any] = CONFIG | {
    **{"blocksparse_homo_head_pattern": True, "mup_use_scaling": False},
    **{"mup_embedding_multiplier": 0.0, "rope_position_scale": 1.0},
}
"""All heads see the same blocks."""
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    inner = config["ff_intermediate_size"]
    of = {"self_attn.query_key_value": (64, 32), "self_attn.dense": (32, 32)}
    of |= {"mlp.up_proj": (2 * inner, 32), "mlp.down_proj": (32, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 32)}
    norms = ["model.final_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in of.items():
            shapes |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[:1]}
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    shapes |= {f"{norm}.{part}": (32,) for norm in norms for part in ("weight", "bias")}
    return random_tensors(shapes)


def logits(config: dict[str, Any], weights: Tensors, tokens: list[int]) -> torch.Tensor:
    """[T, V]; the head is the embedding."""
    table = weights["model.embed_tokens.weight"]
    x_TE = table[tokens] * (config["mup_embedding_multiplier"] or 1.0)
    for layer in range(config["num_hidden_layers"]):
        own = of_layer(weights, f"model.layers.{layer}.")
        sparse = (layer + 1) % config["dense_attention_every_n_layers"] != 0
        x_TE = x_TE + _attention(config, own, _norm(own, "input_layernorm", x_TE), sparse)
        x_TE = x_TE + _mlp(config, own, _norm(own, "post_attention_layernorm", x_TE))
    last_TE = _norm(weights, "model.final_layernorm", x_TE)
    return last_TE @ table.T / config["mup_width_multiplier"]


def _norm(own: Tensors, name: str, x_TE: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x_TE, (WIDTH,), own[f"{name}.weight"], own[f"{name}.bias"], 1e-5)


def _linear(own: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])


def _mlp(config: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """GeGLU with a quick GELU and ups about 1; its inner values take turns."""
    inner_TI, limit = _linear(own, "mlp.up_proj", x_TE), config["gegelu_limit"]
    gate, up = inner_TI[:, ::2].clamp(max=limit), inner_TI[:, 1::2].clamp(-limit, limit)
    return _linear(own, "mlp.down_proj", gate * torch.sigmoid(1.702 * gate) * (up + 1))


def _attention(
    config: dict[str, Any], own: Tensors, x_TE: torch.Tensor, sparse: bool
) -> torch.Tensor:
    """A KV head's queries stand before its key and value."""
    qkv_TKGD = _linear(own, "self_attn.query_key_value", x_TE).view(
        len(x_TE), KV_HEADS, 4, HEAD_DIM
    )
    q_TKGD, k_TKD, v_TKD = qkv_TKGD[:, :, :2], qkv_TKGD[:, :, 2], qkv_TKGD[:, :, 3]
    theta, slower = config["rope_embedding_base"], config["rope_position_scale"]
    q_THD = _turned(q_TKGD.flatten(1, 2), theta, slower)
    scale = config["mup_attn_multiplier"] / HEAD_DIM if config["mup_use_scaling"] else None
    sees = _sees(config, len(x_TE)) if sparse else None
    mixed = attended(q_THD, _turned(k_TKD, theta, slower), v_TKD, scale=scale, sees_HTT=sees)
    return _linear(own, "self_attn.dense", mixed)


def _turned(x_THD: torch.Tensor, theta: float, slower: float) -> torch.Tensor:
    """Positions count for less than they are."""
    if slower == 1.0:
        return rotated(x_THD, theta)
    half = x_THD.shape[-1] // 2
    speed = theta ** (-torch.arange(half) / half) / slower
    angle_T1D = (torch.arange(len(x_THD))[:, None] * speed)[:, None]
    first, second = x_THD.chunk(2, -1)
    cos, sin = angle_T1D.cos(), angle_T1D.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _sees(config: dict[str, Any], tokens: int) -> torch.Tensor:
    """[H, T, T]: near blocks, and one in so many, which moves on from head to head."""
    block, near = config["blocksparse_block_size"], config["blocksparse_num_local_blocks"]
    stride, alike = config["blocksparse_vert_stride"], config["blocksparse_homo_head_pattern"]
    step = 0 if alike else max(1, int(stride / HEADS))
    seen = torch.zeros(HEADS, tokens, tokens, dtype=torch.bool)
    for head in range(HEADS):
        for query in range(tokens):
            for key in range(query + 1):
                blocks = query // block - key // block
                striped = (key // block + head * step + 1) % stride == 0
                seen[head, query, key] = blocks < near or striped
    return seen
