"""XVERSE with experts, written from its published configuration and tensor names (xverse/XVERSE-MoE-A4.2B: num_experts,
moe_top_k, num_shared_experts; intermediate_size is that of an expert)."""

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
from tests.references.plain import Tensors, mlp, norm

CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["XverseMoeForCausalLM"], "model_type": "xverse"},
    **{"intermediate_size": 16, "num_experts": 6, "moe_top_k": 3, "num_shared_experts": 2},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    inner, count = config["intermediate_size"], config["num_experts"]

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = attention_shapes() | {"mlp.router.weight": (count, 48)}
        for i in range(count):
            shapes |= mlp_shapes(f"mlp.experts.{i}", inner)
        return shapes | mlp_shapes("mlp.shared_experts", inner * config["num_shared_experts"])

    return checkpoint(layer)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        x_TE = x_TE + attention(config, own, h_TE)
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        weight_TX = chosen((h_TE @ own["mlp.router.weight"].T).softmax(-1), config["moe_top_k"])
        y_TE = experts(own, weight_TX, h_TE, "mlp.experts.{}")
        return x_TE + y_TE + mlp(own, "mlp.shared_experts", h_TE)

    return run(config, weights, row, layer)
