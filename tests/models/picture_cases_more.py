"""More families in the form of picture_cases.py."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.image_utils import SizeDict
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
    DeepseekVLImageProcessorPil,
)
from transformers.models.glm5_next.image_processing_pil_glm5_next import (
    Glm5NextImageProcessorPil,
)
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
    VideoLlama3ImageProcessorPil,
)

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import preprocessed, without_torchvision
from tests.models.picture_cases import (
    CLIP,
    HALF_NORM,
    IMAGE,
    NEXT,
    VIDEO,
    PictureCase,
    Pictures,
    Theirs,
    as_picture,
    bind,
    llava_next,
)
from tests.models.test_towers import CLIP as CLIP_NORM
from tests.models.test_towers import FLAT_TEXT, FLAT_TOWER, PIXTRAL, TOWER, flat_patches, text
from tests.models.test_wrappers import CASES as WRAPPED

with without_torchvision():
    from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
    from transformers.models.cohere2_vision.image_processing_cohere2_vision import (
        Cohere2VisionImageProcessor,
    )
    from transformers.models.cohere2_vision.processing_cohere2_vision import (
        Cohere2VisionProcessor,
    )
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
    from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
    from transformers.models.llava_next_video.processing_llava_next_video import (
        LlavaNextVideoProcessor,
    )
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3ImageProcessor,
    )

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
    return sliced(pictures, 16)


def minicpm_ocr(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    """Where nothing small is kept small, it is cut as MiniCPM-V's."""
    return sliced(pictures, 4, downsample_mode="4x")


def sliced(pictures: Pictures, patches: int, **more: Any) -> Theirs:
    processor = MiniCPMV4_6ImageProcessorPil(**MINICPM_FILES, **more)
    inputs = processor(list(pictures), return_tensors="pt")
    self = SimpleNamespace(
        slice_mode=True, image_token="I", image_start_token="<image>", image_end_token="</image>",
        slice_start_token="<slice>", slice_end_token="</slice>",
        image_id_start_token="<image_id>", image_id_end_token="</image_id>",
    )  # fmt: skip
    texts = [
        MiniCPMV4_6Processor.replace_image_token(self, inputs, i, image_token_divisor=patches)
        for i in range(len(pictures))
    ]
    texts = MiniCPMV4_6Processor._prepend_local_ids(self, ["I" * len(texts)], texts, "I")
    given = {key: inputs[key] for key in ("pixel_values", "target_sizes")}
    return Theirs(given=given, texts=texts)


def glm(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Glm46VImageProcessorPil(**QWEN_FILES)(list(pictures), return_tensors="pt")
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


def glm_next(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = Glm5NextImageProcessorPil(patch_size=4, **GLM_NEXT_FILES)
    given = dict(inputs(list(pictures), return_tensors="pt"))
    texts = ["I" * (int(grid.prod()) // 4) for grid in given["image_grid_thw"]]
    return Theirs(given=given, texts=texts)


def deepseek_ocr(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = DeepseekOcr2ImageProcessorPil(**OCR_FILES)(list(pictures), return_tensors="pt")
    texts = ["I" * (257 + 144 * int(count)) for count in inputs["num_local_patches"]]
    return Theirs(given=dict(inputs), texts=texts)


def nemotron(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = preprocessed(
        NemotronH_Omni_Reasoning_V3ImageProcessor,
        pictures,
        attributes={"resize": as_floats},
        patch_size=4,
        downsample_ratio=0.5,
        max_model_len=512,
        min_num_patches=NEMOTRON_FILES["min_num_patches"],
        max_num_patches=NEMOTRON_FILES["max_num_patches"],
    )
    grids = inputs["image_grid_hw"].tolist()
    rows = []
    for medium, grid in zip(ours, grids, strict=True):
        (one,) = medium.inputs
        assert list(one.grid[1:]) == grid
        values = one.rows.reshape(grid[0] // 2, grid[1] // 2, 2, 2, 48).swapaxes(1, 2)
        rows.append(torch.from_numpy(values.reshape(-1, 48).copy()).float() / 255)
    values = torch.cat(rows)
    apart = (values - inputs["pixel_values"].clamp(0, 1)).abs() * 255
    assert apart.mean() < 0.25 and apart.max() < 5, (apart.mean(), apart.max())
    mean, std = (torch.tensor(one).repeat_interleave(16) for one in CLIP_NORM)
    given = {"pixel_values": (values - mean) / std, "image_grid_hw": inputs["image_grid_hw"]}
    texts = [f"<img>{'I' * (high * wide // 4)}</img>" for high, wide in grids]
    return Theirs(given=given, texts=texts)


def as_floats(images: torch.Tensor, size: Any, **more: Any) -> torch.Tensor:
    """As torchvision resizes floats, which may leave what colours can be."""
    size = (size.height, size.width)
    return F.interpolate(images, size=size, mode="bicubic", antialias=True)


def with_plain_branches(oracle: Any) -> None:
    """RADIO's branches have no factors; transformers 5.23 stores some that are one."""
    for layer in oracle.vision_model.encoder.layer:
        for scale in (layer.layer_scale1, layer.layer_scale2):
            scale.lambda1.data.fill_(1.0)


NEMOTRON_FILES: dict[str, Any] = {"patch_size": 4, "min_num_patches": 40, "max_num_patches": 90}


def lfm2(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    owner = Lfm2VlImageProcessor
    ratios = inspect.unwrap(owner._target_ratios)
    bounds = {"downsample_factor": 2, "max_image_tokens": 40, "encoder_patch_size": 4}
    self = SimpleNamespace(
        image_token="I", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )  # fmt: skip
    self._target_ratios = lambda least, most: ratios(self, least, most)
    bind(self, owner, "_get_grid_layout", "smart_resize", "_is_image_too_large")
    bind(self, Lfm2VlProcessor, "_build_image_tokens")
    texts, sizes = [], []
    for one in pictures:
        size = {"height": one.height, "width": one.width}
        wide, high = self.smart_resize(**size, **bounds, min_image_tokens=10)
        columns, rows = 1, 1
        if self._is_image_too_large(**size, **bounds, max_pixels_tolerance=2.0):
            columns, rows, *_ = self._get_grid_layout(
                **size, min_tiles=2, max_tiles=4, tile_size=32
            )
            sizes += [(8, 8)] * columns * rows
        sizes.append((high // 4, wide // 4))
        texts.append(self._build_image_tokens(rows, columns, 16, high * wide // 64, True, True))
    inputs = [one for medium in ours for one in medium.inputs]
    grids = [one.grid[1:] for one in inputs]
    assert grids == sizes, (grids, sizes)
    shown = [torch.from_numpy(as_picture(one.rows, one.grid, merge=2))[None] for one in inputs]
    return Theirs(given=flat_patches([(one / 255 - 0.5) / 0.5 for one in shown]), texts=texts)


def got(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64})
    inputs = processor(list(pictures), return_tensors="pt")
    texts = ["I" * 16 for _ in pictures]
    return Theirs(given={"pixel_values": inputs["pixel_values"]}, texts=texts)


def vipllava(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    files = {"size": {"shortest_edge": 16}, "crop_size": SQUARE}
    inputs = CLIPImageProcessorPil(**files)(list(pictures), return_tensors="pt")
    return Theirs(given=dict(inputs), texts=["I" * 16] * len(pictures))


def next_clip(frames: Pictures, ours: ProcessedMedia) -> Theirs:
    files = {"size": {"shortest_edge": 16}, "crop_size": SQUARE}
    inputs = CLIPImageProcessorPil(**files)(list(frames), return_tensors="pt")
    values = inputs["pixel_values"][None]
    self = SimpleNamespace(patch_size=4, video_token="V")
    text = LlavaNextVideoProcessor.replace_video_token(self, {"pixel_values_videos": values}, 0)
    return Theirs(given={"pixel_values_videos": values}, texts=[text])


def deepseek_vl(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = DeepseekVLImageProcessorPil(size=SQUARE, min_size=5, **HALF_NORM)
    inputs = processor(list(pictures), return_tensors="pt")
    return Theirs(given=dict(inputs), texts=["I" * 16 for _ in pictures])


def janus(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    theirs = deepseek_vl(pictures, ours)
    texts = [f"<begin_of_image>{one}<end_of_image>" for one in theirs.texts]
    return Theirs(given=theirs.given, texts=texts)


def video_llama(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = VideoLlama3ImageProcessorPil(**VIDEO_LLAMA_FILES)(list(pictures), return_tensors="pt")
    texts = ["I" * int(grid.prod()) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts)


VIDEO_LLAMA_FILES: dict[str, Any] = {
    "patch_size": 4,
    "size": {"shortest_edge": 64, "longest_edge": 500},
}
OCR_FILES: dict[str, Any] = {"size": {"height": 128, "width": 128}, "tile_size": 96}
QWEN_FILES: dict[str, Any] = {
    **{"patch_size": 4, "merge_size": 2},
    "size": {"shortest_edge": 64, "longest_edge": 900},
}
MINICPM_FILES: dict[str, Any] = {"patch_size": 4, "scale_resolution": 40, "max_slice_nums": 5}
SLICES = {
    **{"<image>": 102, "</image>": 103, "<slice>": 104, "</slice>": 105},
    **{"<image_id>": 106, "</image_id>": 107},
}
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
GLM_NEXT_FILES = {"min_image_tokens": 4, "max_image_tokens": 9}
GLM_NEXT_TEXT = {
    **text("glm5_next_text"),
    **WRAPPED["Glm5Next"][2],
    **{"num_key_value_heads": 4, "head_dim": 0},
}
MINICPM = {
    "vision_config": {**TOWER, "image_size": 24},
    "text_config": {
        **QWEN3_5,
        "layer_types": ["full_attention"] * 2,  # the other kind amplifies rounding
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16},
    },
    **BOTH,
    "insert_layer_id": 1,
}
CASES = {
    "vipllava": PictureCase(
        name="VipLlava",
        config={
            "vision_config": CLIP,
            "text_config": text("llama"),
            "image_token_index": IMAGE,
            "vision_feature_layer": [-1, 1],
        },
        process=vipllava,
    ),
    "llava-next-video": PictureCase(
        name="LlavaNextVideo",
        config={**NEXT, "text_config": text("llama"), "video_token_index": VIDEO},
        process=llava_next,
        clip=next_clip,
    ),
    "deepseek-vl": PictureCase(
        name="DeepseekVL",
        config={"vision_config": SIGLIP, "text_config": text("llama"), "image_token_id": IMAGE},
        process=deepseek_vl,
        files={**HALF_NORM, "min_size": 5},
        sizes=((40, 24), (10, 90)),
    ),
    "janus": PictureCase(
        name="Janus",
        config={
            "vision_config": {**TOWER, "mlp_ratio": 1.5, "projection_dim": 48},
            **{"text_config": text("llama"), "image_token_id": IMAGE},
            "vq_config": {
                **{"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
                **{"latent_channels": 32, "num_embeddings": 8, "projection_dim": 48},
                **{"image_token_embed_dim": 48, "embed_dim": 4},
            },
        },
        process=janus,
        files={**HALF_NORM, "min_size": 5},
        marks={"<begin_of_image>": 102, "<end_of_image>": 103},
        sizes=((40, 24), (10, 90)),
    ),
    "video-llama3": PictureCase(
        name="VideoLlama3",
        config={
            "vision_config": {
                **{key: value for key, value in TOWER.items() if key != "image_size"},
                "model_type": "video_llama_3_vision",
            },
            **{"text_config": text("qwen2"), **BOTH},
        },
        process=video_llama,
        files=VIDEO_LLAMA_FILES,
    ),
    "got-ocr2": PictureCase(
        name="GotOcr2",
        config={
            "vision_config": {
                **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"image_size": 64, "patch_size": 4, "global_attn_indexes": [1], "mlp_dim": 24},
                **{"output_channels": 8, "window_size": 6},
            },
            **{"text_config": text("qwen2"), "image_token_index": IMAGE},
        },
        process=got,
    ),
    "lfm2-vl": PictureCase(
        name="Lfm2Vl",
        config={
            "vision_config": {**FLAT_TOWER, "num_patches": 36, "vision_use_head": False},
            "text_config": {**FLAT_TEXT, "layer_types": ["full_attention", "full_attention"]},
            **{"image_token_id": IMAGE, "downsample_factor": 2, "projector_hidden_size": 56},
        },
        process=lfm2,
        files={
            **{"encoder_patch_size": 4, "tile_size": 32, "max_tiles": 4},
            **{"min_image_tokens": 10, "max_image_tokens": 40},
        },
        marks={
            **{"<|image_start|>": 102, "<|image_end|>": 103, "<|img_thumbnail|>": 104},
            **{
                f"<|img_row_{row}_col_{column}|>": 101 + 4 * row + column
                for row in range(1, 4)
                for column in range(1, 5)
            },
        },
        sizes=((40, 24), (100, 70), (10, 30)),
    ),
    "nemotron-omni": PictureCase(
        name="NemotronH_Omni_Reasoning_V3_",
        model="NemotronH_Omni_Reasoning_V3",
        mended=with_plain_branches,
        config={
            "vision_config": {
                **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"patch_size": 4, "max_img_size": 24, "num_cls_tokens": 2, "num_registers": 1},
                **{"video_temporal_patch_size": 2, "mlp_ratio": 1.5},
            },
            "text_config": {
                **text("nemotron_h", layers_block_type=["full_attention", "mlp"]),
                **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8},
            },
            **{**BOTH, "projector_hidden_size": 40, "vision_hidden_size": 32},
            "audio_config": None,
        },
        process=nemotron,
        files=NEMOTRON_FILES,
        marks={"<image>": 104, "<img>": 105, "</img>": 106},
        sizes=((40, 24), (17, 50)),
    ),
    "deepseek-ocr2": PictureCase(
        name="DeepseekOcr2",
        config={
            "vision_config": {
                "sam_config": {
                    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
                    **{"image_size": 128, "patch_size": 2, "global_attn_indexes": [1]},
                    **{"output_channels": 8, "downsample_channels": [12, 32], "mlp_dim": 24},
                },
                "encoder_config": {
                    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
                    **{"num_attention_heads": 4, "num_key_value_heads": 2},
                },
            },
            "text_config": {
                **{**text("deepseek_ocr2_text"), "max_position_embeddings": 1024},
                **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
                **{"moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"]},
            },
            "image_token_id": IMAGE,
        },
        process=deepseek_ocr,
        files=OCR_FILES,
        sizes=((150, 70),),
        step_tokens=(200,),
        longest=1024,
    ),
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
    "glm5-next": PictureCase(
        name="Glm5Next",
        config={
            "vision_config": {**GLM_OCR, "projection_intermediate_size": 24, "swiglu_limit": 0.7},
            "text_config": GLM_NEXT_TEXT,
            "image_token_id": IMAGE,
        },
        process=glm_next,
        files=GLM_NEXT_FILES,
        sizes=((40, 24), (13, 9)),
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
        config=MINICPM,
        process=minicpm,
        files=MINICPM_FILES,
        marks=SLICES,
        sizes=((40, 24), (70, 90)),
    ),
    "minicpm-ocr": PictureCase(
        name="MiniCPMOcr",
        config=MINICPM,
        process=minicpm_ocr,
        files=MINICPM_FILES,
        marks=SLICES,
        sizes=((30, 24), (50, 70)),
    ),
}
