"""Diffusion language models that write blocks: SDAR, written from its paper (Cheng et al. 2025, arXiv:2510.06303) over
Qwen 3's layers, LLaDA 2 (arXiv:2512.15745) over Ling 2's, Fast-dLLM v2 (arXiv:2509.26328) over Qwen 2.5's, with the
published sampling by confidence, without KV: every pass reads the whole text.

One row at a time; T tokens, E hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.references import sarvam_moe
from tests.references.mixture_parts import (
    SIZES,
    attention_shapes,
    checkpoint,
    chosen,
    experts,
    mlp_shapes,
    run,
)
from tests.references.plain import Tensors, mlp, norm, of_layer, rotated

MASK = 96
SDAR: dict[str, Any] = {
    **{**SIZES, "architectures": ["SDARForCausalLM"], "model_type": "sdar"},
    **{"mask_token_id": MASK, "attention_bias": False, "block_size": 4},
}
SDAR_MOE: dict[str, Any] = {
    **{**SDAR, "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe"},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
LLADA_2: dict[str, Any] = {
    **{**sarvam_moe.CONFIG, "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe"},
    **{"mask_token_id": MASK, "partial_rotary_factor": 0.5, "score_function": "sigmoid"},
}
FAST_DLLM: dict[str, Any] = {
    **{**SIZES, "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen"},
    **{"mask_token_id": MASK, "bd_size": 8},
}
Logits = Callable[[list[int]], torch.Tensor]


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    if config["model_type"] == "llada2_moe":
        return sarvam_moe.tensors(config)

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        if config["model_type"] == "Fast_dLLM_Qwen":
            biases = {"q": 48, "k": 16, "v": 16}
            own = {f"self_attn.{one}_proj.bias": (size,) for one, size in biases.items()}
            return attention_shapes() | own | mlp_shapes("mlp", config["intermediate_size"])
        shapes = attention_shapes() | {f"self_attn.{one}_norm.weight": (8,) for one in "qk"}
        if "num_experts" not in config:
            return shapes | mlp_shapes("mlp", config["intermediate_size"])
        shapes |= {"mlp.gate.weight": (config["num_experts"], 48)}
        for i in range(config["num_experts"]):
            shapes |= mlp_shapes(f"mlp.experts.{i}", config["moe_intermediate_size"])
        return shapes

    return checkpoint(layer)


def logits(
    config: dict[str, Any], weights: Tensors, row: list[int], *, length: int
) -> torch.Tensor:
    """[T, V] of one row, whose blocks have `length` tokens."""
    block = torch.arange(len(row)) // length
    sees_TT = block[None] <= block[:, None]
    eps = config["rms_norm_eps"]

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        x_TE = x_TE + attention(config, own, h_TE, sees_TT)
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        return x_TE + feed_forward(config, own, h_TE)

    if config["model_type"] != "llada2_moe":
        return run(config, weights, row, layer)
    table = weights["model.word_embeddings.weight"]
    return run(config, {**weights, "model.embed_tokens.weight": table}, row, layer)


def feed_forward(config: dict[str, Any], own: Tensors, h_TE: torch.Tensor) -> torch.Tensor:
    """Dense, or a mixture by softmax scores, or Ling's by sigmoid ones."""
    if "mlp.gate_proj.weight" in own:
        return mlp(own, "mlp", h_TE)
    if config["model_type"] == "llada2_moe":
        return sarvam_moe.experts(config, own, h_TE)
    score_TX = (h_TE @ own["mlp.gate.weight"].T).softmax(-1)
    return experts(own, chosen(score_TX, config["num_experts_per_tok"]), h_TE, "mlp.experts.{}")


def attention(
    config: dict[str, Any], own: Tensors, h_TE: torch.Tensor, sees_TT: torch.Tensor
) -> torch.Tensor:
    """With a norm over each head; queries, keys and values in one tensor where Ling has them so."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if config["model_type"] == "llada2_moe":
        at = of_layer(own, "attention.")
        merged = (h_TE @ at["query_key_value.weight"].T).unflatten(1, (-1, config["head_dim"]))
        q, k, v = merged.split((heads, kv_heads, kv_heads), 1)
        norms, out = ("query_layernorm.weight", "key_layernorm.weight"), at["dense.weight"]
    else:
        at = of_layer(own, "self_attn.")
        q, k, v = (
            (h_TE @ at[f"{one}_proj.weight"].T + at.get(f"{one}_proj.bias", 0.0)).unflatten(
                1, (-1, config["head_dim"])
            )
            for one in "qkv"
        )
        norms, out = ("q_norm.weight", "k_norm.weight"), at["o_proj.weight"]
    if norms[0] in at:
        eps = config["rms_norm_eps"]
        q, k = (norm(x, at[name], eps) for x, name in zip((q, k), norms, strict=True))
    share = config.get("partial_rotary_factor", 1.0)
    q, k = (rotated(x, config["rope_theta"], share=share) for x in (q, k))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * config["head_dim"] ** -0.5
    weight = scores.masked_fill(~sees_TT, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weight, v).flatten(1) @ out.T


def generate(
    logits_of: Logits, prompt: list[int], count: int, *, length: int, steps: int, threshold: float
) -> list[int]:
    """`count` greedy tokens behind a prompt, block by block. A pass decides all tokens whose probability is above the
    threshold, if these are its share of the block or more, else its share, the most likely first. The mask itself is
    never an answer."""
    text, end = list(prompt), len(prompt) + count
    while len(text) < end:
        first = len(text) // length * length
        text += [MASK] * (first + length - len(text))
        open_places = [i for i in range(first, first + length) if i >= len(prompt)]
        for step in range(steps):
            share = length // steps + (step < length % steps)
            if not open_places:
                break
            found = logits_of(text)
            found[:, MASK] = -torch.inf
            likely, token = found.softmax(-1).max(-1)
            ranked = sorted(open_places, key=lambda i: -float(likely[i]))
            high = [i for i in ranked if float(likely[i]) > threshold]
            for i in high if len(high) >= share else ranked[:share]:
                text[i] = int(token[i])
                open_places.remove(i)
    return text[len(prompt) : end]


def generate_shifted(
    logits_of: Logits, prompt: list[int], count: int, *, length: int, part: int, threshold: float
) -> list[int]:
    """The same of Fast-dLLM v2, whose logits say the token behind theirs: a whole block says the first token of the
    next; the others come part by part, in each pass those above the threshold and the most likely one."""
    text, end = list(prompt), len(prompt) + count

    def best(row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = logits_of(row)
        found[:, MASK] = -torch.inf
        return found.softmax(-1).max(-1)

    while len(text) < end:
        if len(text) % length == 0:
            text.append(int(best(text)[1][-1]))
        first = len(text) // length * length
        text += [MASK] * (first + length - len(text))
        for begin in range(first, first + length, part):
            while MASK in text[begin : begin + part]:
                likely, token = best(text)
                places = [i for i in range(begin, begin + part) if text[i] == MASK]
                top = max(places, key=lambda i: float(likely[i - 1]))
                for i in places:
                    if i == top or float(likely[i - 1]) > threshold:
                        text[i] = int(token[i - 1])
    return text[len(prompt) : end]
