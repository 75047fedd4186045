"""Tiny configurations of families that see, in the form of test_towers.py, and what transformers' processors would
give them beside ids and pixels."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.test_towers import CLIP, HALF, PIXTRAL, TOWER, Case, text

SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}


def images_as_types(ids: torch.Tensor, token: int) -> dict[str, Any]:
    return {"token_type_ids": (ids == token).long()}


def prompt_as_prefix(ids: torch.Tensor, token: int) -> dict[str, Any]:
    return {"token_type_ids": torch.zeros_like(ids)}


GEMMA4_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "patch_size": 4},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"pooling_kernel_size": 2, "position_embedding_size": 64, "standardize": True},
}
GEMMA4_TEXT = text(
    "gemma4_text",
    sliding_window=7,
    layer_types=["sliding_attention", "full_attention"],
    global_head_dim=12,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=120,
    pad_token_id=119,
)


def images_as_mm_types(ids: torch.Tensor, token: int) -> dict[str, Any]:
    return {"mm_token_type_ids": (ids == token).long()}


LARGE4_TEXT = text(
    "mistral_large4_text",
    **{"num_key_value_heads": 4, "kv_lora_rank": 24, "v_head_dim": 12, "qk_nope_head_dim": 10},
    **{"qk_rope_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 24, "index_n_heads": 16, "index_head_dim": 12},
    **{"index_topk": 12, "no_rope_layers": [1, 0], "kv_source_layers": [0, 1]},
    **{"indexer_types": ["full", "full"], "final_logit_softcapping": 5.0},
)
CASES = {
    "mistral-large4": Case(
        name="MistralLarge4",
        vision=PIXTRAL,
        text=LARGE4_TEXT,
        norm=CLIP,
        config={"image_token_index": 100, "spatial_merge_size": 2},
        merge=2,
        grids=((1, 6, 4), (1, 2, 8)),
        breaks=1,
        sized=True,
    ),
    "gemma4": Case(
        name="Gemma4",
        vision={**GEMMA4_TOWER, "use_clipped_linears": True},
        text=GEMMA4_TEXT,
        norm=((0.0,) * 3, (1.0,) * 3),
        config={"image_token_id": 100, "audio_config": None},
        merge=2,
        grids=((1, 4, 6), (1, 6, 2)),
        placed=True,
        more=images_as_mm_types,
        step_tokens=(4, 9),
    ),
    "gemma4-mutual": Case(
        name="Gemma4",
        vision=GEMMA4_TOWER,
        text={**GEMMA4_TEXT, "use_bidirectional_attention": "vision"},
        norm=((0.0,) * 3, (1.0,) * 3),
        config={"image_token_id": 100, "audio_config": None},
        merge=2,
        grids=((1, 4, 6), (1, 6, 2)),
        placed=True,
        more=images_as_mm_types,
        step_tokens=(6, 9),
    ),
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
