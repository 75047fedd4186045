"""Tiny configurations of families that see, in the form of test_towers.py, and what transformers' processors would
give them beside ids and pixels."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.test_towers import HALF, TOWER, Case, text

SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}


def images_as_types(ids: torch.Tensor, token: int) -> dict[str, Any]:
    return {"token_type_ids": (ids == token).long()}


def prompt_as_prefix(ids: torch.Tensor, token: int) -> dict[str, Any]:
    return {"token_type_ids": torch.zeros_like(ids)}


CASES = {
    "gemma3": Case(
        name="Gemma3",
        vision={**SIGLIP, "image_size": 24},
        text=text(
            "gemma3_text",
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=12,
        ),
        norm=HALF,
        config={"image_token_index": 100, "mm_tokens_per_image": 9},
        merge=2,
        grids=((1, 6, 6), (1, 6, 6)),
        more=images_as_types,
        step_tokens=(9, 14),
    ),
    "paligemma": Case(
        name="PaliGemma",
        vision=SIGLIP,
        text=text("gemma"),
        norm=HALF,
        config={"image_token_index": 100, "projection_dim": 48},
        more=prompt_as_prefix,
        step_tokens=(),
    ),
    "paligemma2": Case(
        name="PaliGemma",
        vision=SIGLIP,
        text=text("gemma2", sliding_window=7, query_pre_attn_scalar=12),
        norm=HALF,
        config={"image_token_index": 100, "projection_dim": 48},
        more=prompt_as_prefix,
        step_tokens=(),
    ),
}
