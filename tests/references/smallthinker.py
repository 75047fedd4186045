"""SmallThinker, written from its report (Song et al. 2025, arXiv:2507.20984) and its published configuration and tensor
names (PowerInfer/SmallThinker-21BA3B-Instruct: rope_layout, sliding_window_layout, moe_primary_router_apply_softmax):
the router reads what goes into the layer, before its attention; gates are cut at zero."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.mixture_parts import (
    SIZES,
    attention,
    attention_shapes,
    checkpoint,
    chosen,
    mlp_shapes,
    run,
)
from tests.references.plain import Tensors, mlp, norm, weighed, window

CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker"},
    **{"moe_num_primary_experts": 6, "moe_num_active_primary_experts": 2},
    **{"moe_ffn_hidden_size": 24, "moe_primary_router_apply_softmax": False},
    **{"rope_layout": [1, 0, 1], "sliding_window_layout": [1, 0, 1], "sliding_window_size": 6},
    "tie_word_embeddings": True,
}
SOFTMAX: dict[str, Any] = {
    **{**CONFIG, "moe_primary_router_apply_softmax": True, "tie_word_embeddings": False},
    **{"rope_layout": [1, 1, 1], "sliding_window_layout": [0, 0, 0]},
}
PARTS = ("gate", "up", "down")


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    count, inner = config["moe_num_primary_experts"], config["moe_ffn_hidden_size"]

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = attention_shapes()
        shapes["block_sparse_moe.primary_router.weight"] = (count, 48)
        for i in range(count):
            shapes |= mlp_shapes(f"block_sparse_moe.experts.{i}", inner, PARTS)
        return shapes

    return checkpoint(layer, tied=config["tie_word_embeddings"])


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps, count = config["rms_norm_eps"], config["moe_num_active_primary_experts"]

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        logits_TX = x_TE @ own["block_sparse_moe.primary_router.weight"].T
        is_softmax = config["moe_primary_router_apply_softmax"]
        # Over all or over the chosen ones alone: their shares of each other are the same.
        score_TX = logits_TX.softmax(-1) if is_softmax else logits_TX.sigmoid()
        weight_TX = chosen(score_TX, count)
        slides = config["sliding_window_layout"][index]
        sees = window(len(x_TE), config["sliding_window_size"]) if slides else None
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        turns = bool(config["rope_layout"][index])
        x_TE = x_TE + attention(config, own, h_TE, turns=turns, sees=sees)
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)

        def expert(i: int) -> torch.Tensor:
            return mlp(own, f"block_sparse_moe.experts.{i}", h_TE, PARTS, F.relu)

        return x_TE + weighed(weight_TX, expert)

    return run(config, weights, row, layer)
