"""More families in the form of picture_cases.py, whose images keep their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import without_torchvision
from tests.models.picture_cases import IMAGE, VIDEO, PictureCase, Pictures, Theirs
from tests.models.test_parity import CASES as TEXTS
from tests.models.test_towers import TOWER, text

with without_torchvision():
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
        pad_along_first_dim,
        patches_merge,
    )
    from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor

WINDOWS: dict[str, Any] = {
    **{"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
    "size": {"shortest_edge": 64, "longest_edge": 900},
}


def minimax(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Qwen2VLImageProcessorPil(**WINDOWS)(list(pictures), return_tensors="pt")
    self = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2), IMAGE_TOKEN="I",
        VISION_START_TOKEN=MiniMaxM3VLProcessor.VISION_START_TOKEN,
        VISION_END_TOKEN=MiniMaxM3VLProcessor.VISION_END_TOKEN,
    )  # fmt: skip
    texts = [
        MiniMaxM3VLProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))
    ]
    return Theirs(given=dict(inputs), texts=texts)


def unified(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    """The windows of Gemma 4's patches; those of smaller pictures are padded."""
    processor = Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70, pooling_kernel_size=2)
    inputs = processor(list(pictures), return_tensors="pt")
    counts = [int(count) for count in inputs["num_soft_tokens_per_image"]]
    values, places = inputs["pixel_values"], inputs["image_position_ids"]
    merged = [
        patches_merge(values[i : i + 1, : 4 * count], places[i : i + 1, : 4 * count], count)
        for i, count in enumerate(counts)
    ]
    padded = [pad_along_first_dim(*(one[0] for one in each), 70) for each in merged]
    pixels, positions = (torch.stack(each) for each in zip(*padded, strict=True))
    return Theirs(
        given={"pixel_values": pixels.float(), "image_position_ids": positions},
        texts=["B" + "I" * count + "E" for count in counts],
        typed=True,
    )


def with_the_masks_of_generation(oracle: Any) -> None:
    """An image's tokens see each other in layers with a window alone, as where transformers 5.23 generates, and in
    Gemma 4; its forward pass lets them in all layers."""
    forward = oracle.model.forward

    def masked(input_ids: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        if not isinstance(attention_mask, dict) and more.get("mm_token_type_ids") is not None:
            attention_mask = oracle.create_masks_for_generate(
                config=oracle.config, inputs_embeds=oracle.get_input_embeddings()(input_ids),
                attention_mask=None, past_key_values=None,
                position_ids=torch.arange(input_ids.shape[1])[None],
                mm_token_type_ids=more["mm_token_type_ids"],
            )  # fmt: skip
        return forward(input_ids=input_ids, attention_mask=attention_mask, **more)

    oracle.model.forward = masked


MINIMAX_TEXT = {
    key: value
    for key, value in TEXTS["minimax-m3"][1].items()
    if key not in ("layer_types", "mlp_layer_types")
}
CASES = {
    "minimax-m3": PictureCase(
        name="MiniMaxM3VL",
        model="MiniMaxM3SparseForConditionalGeneration",
        config={
            "vision_config": {**TOWER, "temporal_patch_size": 2, "spatial_merge_size": 2},
            "text_config": {
                **text("minimax_m3_vl_text"),
                **MINIMAX_TEXT,
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse"],
            },
            **{"image_token_index": IMAGE, "video_token_index": VIDEO},
            "projector_hidden_size": 56,
        },
        process=minimax,
        files=WINDOWS,
        marks={"]<]start of image[>[": 102, "]<]end of image[>[": 103},
        sizes=((40, 24), (17, 50)),
    ),
    "gemma4-unified": PictureCase(
        name="Gemma4Unified",
        config={
            "vision_config": {
                **{"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 32},
                **{"mm_posemb_size": 80, "output_proj_dims": 32},
            },
            "text_config": {
                **text("gemma4_unified_text", pad_token_id=119, sliding_window=7),
                **{"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 12},
            },
            **{"image_token_id": IMAGE, "boi_token_id": 102, "eoi_token_id": 103},
            "audio_config": None,
        },
        process=unified,
        mended=with_the_masks_of_generation,
        files={"max_soft_tokens": 70},
        marks={"B": 102, "E": 103},
        sizes=((40, 24), (17, 50)),
        step_tokens=(90, 75),
    ),
}
