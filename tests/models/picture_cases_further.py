"""Further families in the form of picture_cases.py."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import without_torchvision
from tests.models.picture_cases import HALF_NORM, IMAGE, SIGLIP, PictureCase, Pictures, Theirs
from tests.models.test_towers import TOWER, text

with without_torchvision():
    from transformers.models.aria.processing_aria import AriaProcessor
    from transformers.models.cosmos3_edge.image_processing_pil_cosmos3_edge import (
        Cosmos3EdgeImageProcessorPil,
    )
    from transformers.models.fuyu.processing_fuyu import FuyuProcessor as FuyuWords
    from transformers.models.granite_docling.image_processing_pil_granite_docling import (
        GraniteDoclingImageProcessorPil,
    )
    from transformers.models.granite_docling.processing_granite_docling import (
        GraniteDoclingProcessor,
    )
    from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
        HunYuanVLImageProcessorPil,
    )
    from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

HUNYUAN: dict[str, Any] = {
    **{"patch_size": 4, "merge_size": 2, "temporal_patch_size": 1},
    "size": {"shortest_edge": 64, "longest_edge": 900},
}


def hunyuan(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = HunYuanVLImageProcessorPil(**HUNYUAN)(list(pictures), return_tensors="pt")
    self = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2, spatial_patch_size=1), image_token="I",
        cat_extra_token=True,
    )  # fmt: skip
    texts = [HunYuanVLProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


def idefics2(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Idefics2ImageProcessorPil(**IDEFICS2)([list(pictures)], return_tensors="pt")
    mark = "<fake_token_around_image>"
    texts = [(mark + "I" * 5) * 5 + mark] * len(pictures)
    return Theirs(given=dict(inputs), texts=texts)


def aria(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    """Its processor knows two sizes of images alone."""
    parts = []
    with patch.object(AriaImageProcessorPil, "_preprocess", sized(AriaImageProcessorPil)):
        parts = AriaImageProcessorPil(max_image_size=24, min_image_size=8)(
            list(pictures), return_tensors="pt"
        )
    self = SimpleNamespace(size_conversion={24: 5}, image_token="I")
    texts = [AriaProcessor.replace_image_token(self, parts, i) for i in range(len(pictures))]
    parts.pop("num_crops")
    return Theirs(given=dict(parts), texts=texts)


def sized(owner: Any) -> Any:
    """`_preprocess` that takes any size of images."""
    source = textwrap.dedent(inspect.getsource(owner._preprocess)).replace("[490, 980]", "[24]")
    names: dict[str, Any] = {}
    exec(source, vars(inspect.getmodule(owner)), names)
    return names["_preprocess"]


def hybrid(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = DeepseekVLHybridImageProcessorPil(
        size={"height": 16, "width": 16}, high_res_size={"height": 32, "width": 32}, min_size=5,
        **HALF_NORM,
    )  # fmt: skip
    inputs = processor(list(pictures), return_tensors="pt")
    return Theirs(given=dict(inputs), texts=["I" * 16 for _ in pictures])


def docling(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = GraniteDoclingImageProcessorPil(
        size={"height": 32, "width": 32}, **{**HALF_NORM, **DOCLING}
    )
    inputs = processor([list(pictures)], return_tensors="pt")
    self = SimpleNamespace(
        image_seq_len=4, fake_image_token="<fake_token_around_image>", image_token="I",
        global_image_tag="<global-img>",
    )  # fmt: skip
    texts = [
        GraniteDoclingProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))
    ]
    given = {key: inputs[key] for key in ("pixel_values", "pixel_attention_mask")}
    return Theirs(given=given, texts=texts)


DOCLING = {
    **{"max_patches": 4, "dense_max_patches": 6, "dense_max_scale": 1.1},
    "dense_min_aspect": 1.2,
}


def ernie(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Ernie4_5_VLMoeImageProcessorPil(**HUNYUAN)(list(pictures), return_tensors="pt")
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


def with_marks(oracle: Any) -> None:
    """Its processor tells which tokens are images' and marks around them."""
    forward, marks = oracle.model.forward, torch.tensor([IMAGE, *ERNIE_MARKS.values()])

    def marked(input_ids: torch.Tensor, mm_token_type_ids: Any = None, **more: Any) -> Any:
        if mm_token_type_ids is not None:
            more["moe_mm_token_type_ids"] = torch.isin(input_ids, marks).long()
        return forward(input_ids=input_ids, mm_token_type_ids=mm_token_type_ids, **more)

    oracle.model.forward = marked


ERNIE_MARKS = {
    **{"image_start_token_id": 7, "image_end_token_id": 8},
    **{"video_start_token_id": 9, "video_end_token_id": 10},
}
"""What test_pictures.py has before, between and behind images."""


def fuyu(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = FuyuImageProcessorPil(**FUYU, patch_size={"height": 4, "width": 4})
    rows, texts = [], []
    for picture in pictures:
        inputs = processor(picture, return_tensors="np")
        sides = (inputs[f"image_unpadded_{side}"] for side in ("heights", "widths"))
        height, width = (-(-int(np.ravel(side)[0]) // 4) for side in sides)
        image = np.asarray(inputs["images"][0][0])[:, : height * 4, : width * 4]
        rows.append(processor.patchify_image(image))
        counts = {"num_patches": height * width, "row_width": width}
        self = SimpleNamespace(image_token="I", image_newline_token="|NEWLINE|")
        texts.append(FuyuWords.replace_image_token(self, {}, 0, **counts))
    values = torch.tensor(np.concatenate(rows))[None].float()
    return Theirs(given={"pixel_values": values}, texts=texts)


FUYU: dict[str, Any] = {"size": {"height": 24, "width": 32}}


def cosmos(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Cosmos3EdgeImageProcessorPil(**HUNYUAN)(list(pictures), return_tensors="pt")
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


IDEFICS2: dict[str, Any] = {
    "size": {"shortest_edge": 10, "longest_edge": 30},
    "do_image_splitting": True,
}
PLACES = {f"<row_{y}_col_{x}>": 105 + 3 * y + x for y in (1, 2, 3) for x in (1, 2, 3)}
CASES = {
    "granite-docling": PictureCase(
        name="GraniteDocling",
        config={
            "vision_config": {
                **{**TOWER, "image_size": 32, "out_hidden_size": 48, "scale_factor": 4},
                "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {
                **text("granite_docling_text", embedding_multiplier=3.0, logits_scaling=2.0),
                **{"residual_multiplier": 0.5, "attention_multiplier": 0.3},
            },
            **{"image_token_id": IMAGE, "density_router_hidden_size": 8},
        },
        process=docling,
        files={**HALF_NORM, **DOCLING},
        marks={"<fake_token_around_image>": 102, "<global-img>": 103, **PLACES},
        sizes=((90, 60), (40, 90), (20, 20)),
    ),
    "deepseek-vl-hybrid": PictureCase(
        name="DeepseekVLHybrid",
        config={
            "vision_config": SIGLIP,
            "high_res_vision_config": {
                **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
                **{"image_size": 32, "patch_size": 4, "global_attn_indexes": [0, 2]},
                **{"output_channels": 6, "window_size": 5, "mlp_dim": 24, "num_pos_feats": 3},
                "model_type": "sam_vision_model",
            },
            **{"text_config": text("llama"), "image_token_id": IMAGE},
        },
        process=hybrid,
        files={**HALF_NORM, "min_size": 5},
        sizes=((40, 24), (10, 90)),
    ),
    "ernie4.5-vl": PictureCase(
        name="Ernie4_5_VLMoe",
        config={
            "vision_config": {
                **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40},
                **{"patch_size": 4, "spatial_merge_size": 2},
            },
            "text_config": {
                **text("ernie4_5_vl_moe_text", num_hidden_layers=3, head_dim=16),
                **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 20]},
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [3, 3, 2]},
                },
            },
            **{"image_token_id": IMAGE, **ERNIE_MARKS},
        },
        process=ernie,
        mended=with_marks,
        files=HUNYUAN,
        step_tokens=(7, 3),
    ),
    "fuyu": PictureCase(
        name="Fuyu",
        model="FuyuForCausalLM",
        config={
            "text_config": text("persimmon", qk_layernorm=True),
            **{"patch_size": 4, "image_token_id": IMAGE},
        },
        process=fuyu,
        files={**FUYU, "image_mean": 0.5, "image_std": 0.5},
        marks={"|NEWLINE|": 102, "<s>": 103},
        sizes=((40, 24), (17, 10)),
    ),
    "cosmos3-edge": PictureCase(
        name="Cosmos3Edge",
        config={
            "vision_config": {
                **{key: value for key, value in TOWER.items() if key != "image_size"},
                **{"num_patches": 36, "spatial_merge_size": 2},
            },
            "text_config": {
                **text("cosmos3_edge_text", head_dim=16),
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
                },
            },
            **{"image_token_id": IMAGE, "projector_hidden_size": 56},
        },
        process=cosmos,
        files={**HUNYUAN, **HALF_NORM},
    ),
    "idefics2": PictureCase(
        name="Idefics2",
        config={
            "vision_config": TOWER,
            "perceiver_config": {
                **{"hidden_size": 48, "resampler_n_latents": 5, "resampler_depth": 2},
                **{"resampler_n_heads": 4, "resampler_head_dim": 10, "num_key_value_heads": 2},
            },
            "text_config": text("mistral", sliding_window=None),
            "image_token_id": IMAGE,
        },
        process=idefics2,
        files=IDEFICS2,
        marks={"<fake_token_around_image>": 102},
    ),
    "aria": PictureCase(
        name="Aria",
        config={
            "vision_config": {**TOWER, "model_type": "idefics3_vision"},
            "text_config": text(
                "aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=2
            ),
            **{"image_token_index": IMAGE, "projector_patch_to_query_dict": {16: 3, 36: 5}},
        },
        process=aria,
        files={"max_image_size": 24, "min_image_size": 8},
    ),
    "hunyuan-vl": PictureCase(
        name="HunYuanVL",
        config={
            "vision_config": {**TOWER, "max_image_size": 24, "text_hidden_size": 48},
            "text_config": {
                **text("hunyuan_vl_text"),
                "rope_parameters": {
                    **{
                        "rope_type": "dynamic",
                        "factor": 1.0,
                        "alpha": 100.0,
                        "rope_theta": 10000.0,
                    },
                    "mrope_section": [1, 2, 1, 2],
                },
            },
            **{"image_token_id": IMAGE, "im_start_id": 102, "im_end_id": 103},
        },
        process=hunyuan,
        files=HUNYUAN,
    ),
}
