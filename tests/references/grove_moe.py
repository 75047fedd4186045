"""GroveMoE, written from its paper (Wu et al. 2025, arXiv:2508.07785) and its published tensor names
(inclusionAI/GroveMoE-Inst): every two experts share an adjugate one, whose results count 0.05 times."""

from __future__ import annotations

from typing import Any

import torch

from tests.references.mixture_parts import (
    SIZES,
    attention,
    attention_shapes,
    checkpoint,
    chosen,
    experts,
    mlp_shapes,
    run,
)
from tests.references.plain import Tensors, norm

CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["GroveMoeForCausalLM"], "model_type": "grove_moe"},
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
GROUP, ADJUGATE, SHARE = 2, 128, 0.05


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    count = config["num_experts"]

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = attention_shapes() | {f"self_attn.{one}_norm.weight": (8,) for one in "qk"}
        shapes |= {"mlp.gate.weight": (count, 48), "mlp.expert_bias": (count,)}
        for i in range(count):
            shapes |= mlp_shapes(f"mlp.experts.{i}", config["moe_intermediate_size"])
        for i in range(count // GROUP):
            shapes |= mlp_shapes(f"mlp.chunk_experts.{i}", ADJUGATE)
        return shapes

    return checkpoint(layer)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        x_TE = x_TE + attention(config, own, h_TE, normed=True)
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        score_TX = (h_TE @ own["mlp.gate.weight"].T).softmax(-1)
        weight_TX = chosen(score_TX, config["num_experts_per_tok"])
        of_groups = weight_TX.unflatten(1, (-1, GROUP)).sum(-1)
        y_TE = experts(own, weight_TX, h_TE, "mlp.experts.{}")
        return x_TE + y_TE + SHARE * experts(own, of_groups, h_TE, "mlp.chunk_experts.{}")

    return run(config, weights, row, layer)
