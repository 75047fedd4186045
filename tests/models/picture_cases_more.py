"""More families in the form of picture_cases.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from transformers.image_utils import SizeDict
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import preprocessed, without_torchvision
from tests.models.picture_cases import HALF_NORM, IMAGE, VIDEO, PictureCase, Pictures, Theirs
from tests.models.test_towers import PIXTRAL, TOWER, text

with without_torchvision():
    from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
    from transformers.models.cohere2_vision.image_processing_cohere2_vision import (
        Cohere2VisionImageProcessor,
    )
    from transformers.models.cohere2_vision.processing_cohere2_vision import (
        Cohere2VisionProcessor,
    )
    from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

SQUARE = {"height": 16, "width": 16}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}


def aya(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    files = {**HALF_NORM, "size": SQUARE, "crop_to_patches": True, "max_patches": 5}
    inputs = GotOcr2ImageProcessorPil(**files)(list(pictures), return_tensors="pt")
    self = SimpleNamespace(
        img_size=16, patch_size=8, start_of_img_token="<|START_OF_IMG|>", img_patch_token="I",
        end_of_img_token="<|END_OF_IMG|>", tile_token="TILE", tile_global_token="TILE_GLOBAL",
    )  # fmt: skip
    texts = [AyaVisionProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))]
    return Theirs(given={"pixel_values": inputs["pixel_values"]}, texts=texts)


def with_scaled_logits(oracle: Any) -> None:
    """Logits are scaled as by Cohere's decoders alone, which transformers 5.23 leaves out around them."""
    head, scale = oracle.lm_head.forward, oracle.config.text_config.logit_scale
    oracle.lm_head.forward = lambda hidden: head(hidden) * scale


def command(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = preprocessed(
        Cohere2VisionImageProcessor,
        pictures,
        size=SizeDict(**SQUARE),
        crop_to_patches=True,
        min_patches=1,
        max_patches=5,
        do_pad=None,
    )
    self = SimpleNamespace(
        patch_size=2, image_token="I", boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>", img_line_break_token="<|IMG_LINE_BREAK|>",
    )  # fmt: skip
    texts = [
        Cohere2VisionProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))
    ]
    return Theirs(given={"pixel_values": (inputs["pixel_values"] - 0.5) / 0.5}, texts=texts)


def lighton(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = PixtralImageProcessorPil(
        size={"longest_edge": 40}, patch_size={"height": 8, "width": 8}
    )
    inputs = processor(list(pictures), return_tensors="pt")
    self = SimpleNamespace(effective_patch_size=8, image_token="I")
    texts = [LightOnOcrProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))]
    return Theirs(given=dict(inputs), texts=texts)


def qianfan(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    files = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    files |= {"size": SQUARE, "crop_to_patches": True, "max_patches": 5}
    inputs = GotOcr2ImageProcessorPil(**files)(list(pictures), return_tensors="pt")
    texts = [f"<img>{'I' * 4 * int(count)}</img>" for count in inputs["num_patches"]]
    return Theirs(given={"pixel_values": inputs["pixel_values"]}, texts=texts)


def qwen(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Qwen2VLImageProcessorPil(**QWEN_FILES)(list(pictures), return_tensors="pt")
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts)


def minicpm(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = MiniCPMV4_6ImageProcessorPil(**MINICPM_FILES)(list(pictures), return_tensors="pt")
    self = SimpleNamespace(
        slice_mode=True, image_token="I", image_start_token="<image>", image_end_token="</image>",
        slice_start_token="<slice>", slice_end_token="</slice>",
        image_id_start_token="<image_id>", image_id_end_token="</image_id>",
    )  # fmt: skip
    texts = [
        MiniCPMV4_6Processor.replace_image_token(self, inputs, i, image_token_divisor=16)
        for i in range(len(pictures))
    ]
    texts = MiniCPMV4_6Processor._prepend_local_ids(self, ["I" * len(texts)], texts, "I")
    given = {key: inputs[key] for key in ("pixel_values", "target_sizes")}
    return Theirs(given=given, texts=texts)


def glm(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Glm46VImageProcessorPil(**QWEN_FILES)(list(pictures), return_tensors="pt")
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


QWEN_FILES: dict[str, Any] = {
    **{"patch_size": 4, "merge_size": 2},
    "size": {"shortest_edge": 64, "longest_edge": 900},
}
MINICPM_FILES: dict[str, Any] = {"patch_size": 4, "scale_resolution": 40, "max_slice_nums": 5}
WINDOWED: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4},
    **{"out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
}
GLM_OCR: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 48, "image_size": 16},
}
QWEN3_5 = {key: value for key, value in text("qwen3_5_text").items() if key != "head_dim"}
IMAGE_MARKS = {"<|START_OF_IMG|>": 102, "<|END_OF_IMG|>": 103}
BOTH = {"image_token_id": IMAGE, "video_token_id": VIDEO}
CASES = {
    "aya-vision": PictureCase(
        name="AyaVision",
        mended=with_scaled_logits,
        config={
            **{"vision_config": SIGLIP, "text_config": text("cohere2"), "image_token_index": IMAGE},
            "alignment_intermediate_size": 56,
        },
        process=aya,
        files={"max_patches": 5},
        marks={**IMAGE_MARKS, "<image>": 104, "TILE_GLOBAL": 105, "TILE": 106},
    ),
    "cohere2-vision": PictureCase(
        name="Cohere2Vision",
        mended=with_scaled_logits,
        config={
            **{"vision_config": SIGLIP, "text_config": text("cohere2"), "image_token_id": IMAGE},
            "alignment_intermediate_size": 56,
        },
        process=command,
        files={"max_patches": 5},
        marks={**IMAGE_MARKS, "<|IMG_LINE_BREAK|>": 104},
    ),
    "lighton-ocr": PictureCase(
        name="LightOnOcr",
        config={
            **{"vision_config": PIXTRAL, "text_config": text("qwen3"), "image_token_id": IMAGE},
        },
        process=lighton,
        files={"size": {"longest_edge": 40}},
    ),
    "qianfan-ocr": PictureCase(
        name="QianfanOCR",
        renamed=((r"^language_model\.model\.encoder\.", "language_model.model."),),
        config={
            "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            **{"text_config": text("qwen3"), "image_token_id": IMAGE},
        },
        process=qianfan,
        files={"max_patches": 5},
        marks={"<image>": 104, "<img>": 105, "</img>": 106},
    ),
    "exaone4.5": PictureCase(
        name="Exaone4_5_",
        config={
            "vision_config": {**WINDOWED, "num_key_value_heads": 2},
            **{"text_config": text("exaone4"), **BOTH},
        },
        process=qwen,
        files=QWEN_FILES,
    ),
    "hyperclovax-vision": PictureCase(
        name="HyperCLOVAXVisionV2",
        config={
            "vision_config": {**WINDOWED, "model_type": "qwen2_5_vl_vision"},
            **{"text_config": text("hyperclovax", logits_scaling=0.5), **BOTH},
        },
        process=qwen,
        files=QWEN_FILES,
    ),
    "glm-ocr": PictureCase(
        name="GlmOcr",
        config={
            **{"vision_config": GLM_OCR, **BOTH},
            "text_config": {
                **text("glm_ocr_text"),
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]},
                    "partial_rotary_factor": 1.0,
                },
            },
        },
        process=glm,
        files=QWEN_FILES,
    ),
    "minicpm-v4.6": PictureCase(
        name="MiniCPMV4_6",
        config={
            "vision_config": {**TOWER, "image_size": 24},
            "text_config": {
                **QWEN3_5,
                "layer_types": [
                    "full_attention",
                    "full_attention",
                ],  # the other kind amplifies rounding
                **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
                **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16},
            },
            **BOTH,
            "insert_layer_id": 1,
        },
        process=minicpm,
        files=MINICPM_FILES,
        marks={
            **{"<image>": 102, "</image>": 103, "<slice>": 104, "</slice>": 105},
            **{"<image_id>": 106, "</image_id>": 107},
        },
        sizes=((40, 24), (70, 90)),
    ),
}
