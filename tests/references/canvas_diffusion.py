"""Diffusion language models whose tokens all see each other: LLaDA (Nie et al. 2025, arXiv:2502.09992) over Llama's
layers under OLMo's names, LLaDA-MoE over experts with a norm of each head, Dream (arXiv:2508.15487) over Qwen 2.5's
layers; with the published samplers, one row at a time, every pass over the whole text.

The mask itself is never an answer. T tokens, E hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.references.mixture_parts import SIZES, attention_shapes, checkpoint, experts, mlp_shapes
from tests.references.plain import Tensors, best, mlp, norm, of_layer, rotated

MASK = 96
LLADA: dict[str, Any] = {
    **{"architectures": ["LLaDAModelLM"], "model_type": "llada", "vocab_size": 97},
    **{"d_model": 48, "n_heads": 6, "n_kv_heads": 2, "n_layers": 3, "mlp_hidden_size": 40},
    **{"embedding_size": 97, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope": True},
    **{"max_sequence_length": 128, "weight_tying": False, "include_bias": False, "alibi": False},
    **{"activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms"},
    **{"mask_token_id": MASK, "clip_qkv": None, "block_group_size": 1},
}
DREAM: dict[str, Any] = {
    **{**SIZES, "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": MASK},
    **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28},
}
LLADA_MOE: dict[str, Any] = {
    **{**SIZES, "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "mask_token_id": MASK},
    **{"qk_layernorm": True, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": None},
    **{"expert_intermediate_size": 24, "moe_layer_freq": [1, 1, 1], "attention_bias": False},
    "shared_expert_intermediate_size": None,
}
LLADA_MOE.pop("intermediate_size")
LLADA_MOE.pop("norm_topk_prob")
PUBLISHED = (
    ("model.embed_tokens", "model.transformer.wte"),
    ("model.norm", "model.transformer.ln_f"),
    ("lm_head", "model.transformer.ff_out"),
    ("model.layers", "model.transformer.blocks"),
    ("self_attn.o_proj", "attn_out"),
    ("self_attn.", ""),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ff_norm"),
    ("mlp.gate_proj", "ff_proj"),
    ("mlp.up_proj", "up_proj"),
    ("mlp.down_proj", "ff_out"),
)
Logits = Callable[[list[int]], torch.Tensor]


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under Llama's names."""

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = attention_shapes()
        if "num_experts" in config:
            shapes |= {f"self_attn.{one}_norm.weight": (8,) for one in "qk"}
            shapes |= {"mlp.gate.weight": (config["num_experts"], 48)}
            for i in range(config["num_experts"]):
                shapes |= mlp_shapes(f"mlp.experts.{i}", config["expert_intermediate_size"])
            return shapes
        if config["model_type"] == "Dream":
            biases = {"q": 48, "k": 16, "v": 16}
            shapes |= {f"self_attn.{one}_proj.bias": (size,) for one, size in biases.items()}
        return shapes | mlp_shapes("mlp", 40)

    return checkpoint(layer)


def published(config: dict[str, Any], weights: Tensors) -> Tensors:
    """As its authors name them."""
    if config["architectures"] != ["LLaDAModelLM"]:
        return weights
    found = {}
    for name, tensor in weights.items():
        for ours, theirs in PUBLISHED:
            name = name.replace(ours, theirs)
        found[name] = tensor
    return found


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]
    x_TE = weights["model.embed_tokens.weight"][row]
    for index in range(3):
        own = of_layer(weights, f"model.layers.{index}.")
        x_TE = x_TE + _attention(config, own, norm(x_TE, own["input_layernorm.weight"], eps))
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        if "num_experts" in config:
            weight_TX = best((h_TE @ own["mlp.gate.weight"].T).softmax(-1), 2)
            x_TE = x_TE + experts(own, weight_TX, h_TE, "mlp.experts.{}")
        else:
            x_TE = x_TE + mlp(own, "mlp", h_TE)
    return norm(x_TE, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _attention(config: dict[str, Any], own: Tensors, h_TE: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        F.linear(
            h_TE, own[f"self_attn.{one}_proj.weight"], own.get(f"self_attn.{one}_proj.bias")
        ).unflatten(1, (-1, 8))
        for one in "qkv"
    )
    if "self_attn.q_norm.weight" in own:
        q, k = (
            norm(x, own[f"self_attn.{one}_norm.weight"], config["rms_norm_eps"])
            for x, one in ((q, "q"), (k, "k"))
        )
    q, k = (rotated(x, config["rope_theta"]).transpose(0, 1) for x in (q, k))
    k, v = (x.repeat_interleave(3, 0) for x in (k, v.transpose(0, 1)))
    y_HTD = F.scaled_dot_product_attention(q, k, v)
    return y_HTD.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def _read(logits_of: Logits, text: list[int]) -> torch.Tensor:
    found = logits_of(text)
    found[:, MASK] = -torch.inf
    return found


def generate(
    logits_of: Logits, prompt: list[int], count: int, *, length: int, steps: int, threshold: float
) -> list[int]:
    """LLaDA's, by low-confidence remasking in blocks of `length`, of each of which a pass decides an even share, or
    all that are above the threshold, where these are more."""
    text = prompt + [MASK] * count
    for first in range(len(prompt), len(text), length):
        for step in range(steps):
            open_places = [
                i for i in range(first, min(first + length, len(text))) if text[i] == MASK
            ]
            if not open_places:
                break
            likely, token = _read(logits_of, text).softmax(-1).max(-1)
            share = length // steps + (step < length % steps)
            ranked = sorted(open_places, key=lambda i: -float(likely[i]))
            high = [i for i in ranked if float(likely[i]) > threshold]
            for i in high if len(high) >= share else ranked[:share]:
                text[i] = int(token[i])
    return text[len(prompt) :]


def generate_timed(
    logits_of: Logits, prompt: list[int], count: int, *, steps: int, order: str
) -> list[int]:
    """Dream's: in any order, so many in each pass as time falls from 1 to 0.001; logits say the token behind
    theirs."""
    text = torch.tensor(prompt + [MASK] * count)
    times = torch.linspace(1, 1e-3, steps + 1)
    for step in range(steps):
        open_places = (text == MASK).nonzero()[:, 0]
        found = _read(logits_of, text.tolist())
        chance = torch.cat((found[:1], found[:-1]))[open_places].softmax(-1)
        likely, token = chance.max(-1)
        if order == "entropy":
            likely = (chance * (chance + 1e-10).log()).sum(-1)
        elif order == "margin":
            top = chance.sort(-1, descending=True).values
            likely = top[:, 0] - top[:, 1]
        share = len(open_places)
        if step < steps - 1:
            share = int(share * (1 - times[step + 1] / times[step]))
        chosen = likely.topk(share).indices
        text[open_places[chosen]] = token[chosen]
    return text[len(prompt) :].tolist()
