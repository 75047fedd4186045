"""Families whose images become more than one input or other rows than their windows, from pictures to logits: tiny
configurations, and what transformers' own processors make of the same pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import preprocessed, without_torchvision
from tests.models.test_parity import SIZES
from tests.models.test_towers import CLIP as CLIP_NORM
from tests.models.test_towers import HALF, TOWER, text
from tests.models.test_wrappers import CASES as WRAPPED

with without_torchvision():
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
    from transformers.models.llama4.processing_llama4 import Llama4Processor
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )
    from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor
    from transformers.models.step3p7.processing_step3p7 import Step3p7Processor

IMAGE, VIDEO = 100, 101
Pictures = Sequence[Image.Image]


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """What transformers makes of pictures: what its model takes beside ids, and the text of each, in which `I` stands
    for the placeholder (`V`: for a video's); `typed`: the model is told which tokens are images'."""

    given: dict[str, Any]
    texts: list[str]
    typed: bool = False


@dataclass(frozen=True, kw_only=True)
class PictureCase:
    """`mended`: what is wrong with transformers' model. `reads`: it takes text alone. `renamed`: names transformers
    stores wrongly, as published ones are. `marks`: ids of tokens in an image's text. `process`: transformers'
    processor; it is told what ours made too."""

    name: str
    config: dict[str, Any]
    renamed: tuple[tuple[str, str], ...] = ()
    process: Callable[[Pictures, Sequence[ProcessedMedia]], Theirs]
    files: dict[str, Any] = field(default_factory=dict)
    video_files: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((40, 24), (17, 50))
    step_tokens: tuple[int, ...] = (7, 3)
    model: str = ""
    longest: int = 512
    num_frames: int = 3
    rate: float = 2.0
    reads: bool = True
    mended: Callable[[Any], None] | None = None
    clip: Callable[[Pictures, ProcessedMedia], Theirs] | None = None

    def build(self, folder: Path) -> Any:
        """The family's config and class."""
        config = getattr(transformers, f"{self.name}Config")(
            tie_word_embeddings=False, **self.config
        )
        kind = self.model or f"{self.name}ForConditionalGeneration"
        return config, getattr(transformers, kind)


SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
HALF_NORM = {"image_mean": HALF[0], "image_std": HALF[1]}
POINTS = [[16, 16], [16, 32], [32, 16], [32, 32], [48, 16], [16, 48], [48, 48]]


def llava_next(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    square = {"height": 16, "width": 16}
    files = {"size": {"shortest_edge": 16}, "crop_size": square, "image_grid_pinpoints": POINTS}
    processor = LlavaNextImageProcessorPil(**files)
    inputs = processor(list(pictures), return_tensors="pt")
    self = SimpleNamespace(
        patch_size=4, num_additional_image_tokens=1, vision_feature_select_strategy="default",
        image_token="I", image_processor=processor,
    )  # fmt: skip
    bind(self, LlavaNextProcessor, "_get_number_of_features", "_get_unpadded_features")
    texts = [LlavaNextProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))]
    return Theirs(given=dict(inputs), texts=texts)


def bind(self: SimpleNamespace, owner: type, *names: str) -> None:
    for name in names:
        setattr(self, name, getattr(owner, name).__get__(self))


def llava_onevision(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    files = {**HALF_NORM, "size": {"height": 16, "width": 16}, "image_grid_pinpoints": POINTS}
    processor = LlavaOnevisionImageProcessorPil(**files)
    inputs = processor([list(pictures)], return_tensors="pt")
    self = SimpleNamespace(
        num_image_tokens=16, vision_feature_select_strategy="full", image_token="I",
        image_processor=processor, vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    bind(self, LlavaOnevisionProcessor, "_get_number_of_features", "_get_unpadded_features")
    texts = [
        LlavaOnevisionProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))
    ]
    return Theirs(given=dict(inputs), texts=texts)


def onevision_clip(frames: Pictures, ours: ProcessedMedia) -> Theirs:
    small = [frame.resize((16, 16), Image.Resampling.BICUBIC) for frame in frames]
    values = np.stack([np.asarray(one) for one in small]).transpose(0, 3, 1, 2) / 255.0
    mean, std = (np.array(one).reshape(1, 3, 1, 1) for one in HALF)
    values = torch.tensor((values - mean) / std)[None].float()
    self = SimpleNamespace(num_image_tokens=16, video_token="V")
    text = LlavaOnevisionProcessor.replace_video_token(self, {"pixel_values_videos": values}, 0)
    return Theirs(given={"pixel_values_videos": values}, texts=[text])


def squares_of(ours: Sequence[ProcessedMedia], merge: int) -> torch.Tensor:
    """Our squares [N, 3, side, side], of values between 0 and 1."""
    squares = [
        as_picture(one.rows, one.grid, merge=merge) for medium in ours for one in medium.inputs
    ]
    return torch.tensor(np.stack(squares)).float() / 255


def as_picture(rows: np.ndarray, grid: tuple[int, int, int], merge: int, patch: int = 4) -> Any:
    """uint8 [3, H, W] of an input of one step."""
    _, h, w = grid
    windows = rows.reshape(h // merge, w // merge, merge, merge, 3, patch, patch)
    return windows.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, h * patch, w * patch)


def llama4(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    self = SimpleNamespace(patch_size=4, downsample_ratio=4)
    bind(self, Llama4Processor, "_prompt_split_image")
    parts, texts = [], []
    for picture in pictures:
        inputs = preprocessed(
            Llama4ImageProcessor,
            [picture],
            size=SizeDict(height=16, width=16),
            max_patches=6,
            resize_to_max_canvas=False,
        )
        parts.append(inputs["pixel_values"].flatten(0, -4))
        ratios = {**inputs, "pixel_values": parts[-1:]}
        texts.append(Llama4Processor.replace_image_token(self, ratios, 0))
    values = torch.cat(parts)
    assert torch.equal(values, squares_of(ours, 2))
    texts = [each.replace("<|patch|>", "I") for each in texts]
    return Theirs(given={"pixel_values": (values - 0.5) / 0.5}, texts=texts)


KIMI = {"patch_size": 4, "merge_size": 2, "max_patches": 40}


def kimi(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    size = SizeDict(max_height=12, max_width=12)
    inputs = preprocessed(Kimi_K25ImageProcessor, pictures, size=size, **KIMI)
    rows = [one.rows.reshape(one.grid[1] // 2, one.grid[2] // 2, 2, 2, 3, 4, 4)
            for medium in ours for one in medium.inputs]  # fmt: skip
    plain = [each.transpose(0, 2, 1, 3, 4, 5, 6).reshape(-1, 3, 4, 4) for each in rows]
    values = inputs["pixel_values"]
    assert torch.equal(values, torch.tensor(np.concatenate(plain)).float() / 255)
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given={**inputs, "pixel_values": (values - 0.5) / 0.5}, texts=texts)


def with_whole_clips(oracle: Any) -> None:
    """Rows of clips are not split by input, where transformers 5.23 counts those of every frame."""

    def get_video_features(pixels: torch.Tensor, grids: torch.Tensor, **more: Any) -> Any:
        outputs = oracle.model.vision_tower(pixels, grid_thw=grids)
        outputs.pooler_output = [oracle.model.mm_projector(outputs.pooler_output).squeeze(1)]
        return outputs

    oracle.model.get_video_features = get_video_features


def kimi_clip(frames: Pictures, ours: ProcessedMedia) -> Theirs:
    video = torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in frames])
    inputs = preprocessed(
        Kimi_K25VideoProcessor, (), videos=[video], size=SizeDict(max_height=12, max_width=12),
        temporal_patch_size=2, **KIMI,
    )  # fmt: skip
    given = {
        **inputs,
        "video_metadata": [SimpleNamespace(fps=2.0, timestamps=[0.0, 0.5, 1.0, 1.5])],
    }
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    self = SimpleNamespace(video_processor=sizes, video_token="V")
    texts = [Kimi_K25Processor.replace_video_token(self, given, 0)]
    inputs.pop("num_chunks_per_video")
    inputs["pixel_values_videos"] = (inputs["pixel_values_videos"] - 0.5) / 0.5
    return Theirs(given=dict(inputs), texts=texts)


def ovis2(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = Ovis2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=5
    )
    inputs = processor(list(pictures), return_tensors="pt")
    self = SimpleNamespace(image_seq_length=4)
    texts = [Ovis2Processor.replace_image_token(self, inputs, i) for i in range(len(pictures))]
    texts = [each.replace("<IMG_ATOM>", "I") for each in texts]
    return Theirs(given={"pixel_values": inputs["pixel_values"]}, texts=texts)


def step(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    inputs = preprocessed(
        Step3p7ImageProcessor,
        pictures,
        attributes={"max_image_size": 120},
        size=SizeDict(height=32, width=32),
        patch_size=16,
    )
    self = SimpleNamespace(image_feature_placeholder="I" * 4, patch_feature_placeholder="I")
    texts = [Step3p7Processor.replace_image_token(self, inputs, i) for i in range(len(pictures))]
    mine = [squares_of([one], 4) for one in by_input(ours)]
    for side, name in ((16, "pixel_values_local"), (32, "pixel_values")):
        values = torch.cat([one for one in mine if one.shape[-1] == side])
        assert torch.equal(values, inputs[name])
        inputs[name] = clip_normalized(values)
    inputs.pop("patch_newline_masks")
    return Theirs(given=dict(inputs), texts=texts)


def by_input(ours: Sequence[ProcessedMedia]) -> list[ProcessedMedia]:
    return [ProcessedMedia(inputs=(one,), layout=(0,)) for medium in ours for one in medium.inputs]


def clip_normalized(values: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in CLIP_NORM)
    return (values - mean) / std


def paddleocr(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = PaddleOCRVLImageProcessorPil(**PADDLE_FILES)
    inputs = processor(list(pictures), return_tensors="pt")
    texts = ["I" * (int(grid.prod()) // 4) for grid in inputs["image_grid_thw"]]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


NEXT = {"vision_config": CLIP, "image_token_index": IMAGE, "image_grid_pinpoints": POINTS}
ONEVISION = {
    "vision_config": SIGLIP,
    "text_config": text("qwen2"),
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "image_grid_pinpoints": POINTS,
    "vision_aspect_ratio": "anyres_max_2",
}
STEP_TEXT = {**SIZES, **WRAPPED["Step3p7"][2], "vocab_size": 120}
LLAMA4_MARKS = {
    **{"<|image_start|>": 102, "<|image_end|>": 103, "<|image|>": 104},
    **{"<|tile_x_separator|>": 105, "<|tile_y_separator|>": 106},
}
KIMI_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "patch_size": 4},
    **{"num_attention_heads": 2, "pos_emb_height": 6, "pos_emb_width": 6, "pos_emb_time": 2},
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
MLA = {
    **{"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1},
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"first_k_dense_replace": 1, "head_dim": 8},
}
OVIS_MARKS = ("<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>")
PADDLE_FILES = {"patch_size": 4, "size": {"shortest_edge": 400, "longest_edge": 900}}
CASES = {
    "paddleocr-vl": PictureCase(
        name="PaddleOCRVL",
        config={
            "vision_config": {
                **TOWER,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
            },
            "text_config": {
                **text("paddleocr_vl_text", head_dim=12),
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]},
                },
            },
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": 118,
        },
        process=paddleocr,
        files=PADDLE_FILES,
        sizes=((40, 24), (17, 50), (5, 30)),
    ),
    "step3p7": PictureCase(
        name="Step3p7",
        config={
            "vision_config": {
                **{"width": 32, "layers": 2, "heads": 2, "image_size": 32, "patch_size": 4},
                **{
                    "mlp_ratio": 1.5,
                    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
                },
            },
            "text_config": {**STEP_TEXT, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
            "image_token_id": IMAGE,
        },
        process=step,
        files={"size": {"height": 32, "width": 32}, "patch_size": 16, "max_image_size": 120},
        marks={
            **{"<patch_start>": 102, "<patch_end>": 103, "<patch_newline>": 104},
            **{"<im_start>": 105, "<im_end>": 106},
        },
        sizes=((40, 24), (130, 61), (20, 20)),
    ),
    "ovis2": PictureCase(
        name="Ovis2",
        config={
            "vision_config": {**TOWER, "vocab_size": 30, "hidden_stride": 2},
            "text_config": text("qwen2"),
            "image_token_id": IMAGE,
            "visual_indicator_token_ids": [102, 103, 104, 105, 106],
            "hidden_size": 48,
            "vocab_size": 120,
        },
        process=ovis2,
        files={"crop_to_patches": True, "max_patches": 5},
        marks={"<image>": 107, **{mark: 102 + i for i, mark in enumerate(OVIS_MARKS)}},
        step_tokens=(3, 7),
    ),
    "kimi-k25": PictureCase(
        name="Kimi_K25",
        config={
            "vision_config": KIMI_TOWER,
            "text_config": text("deepseek_v3", **MLA),
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "projection_hidden_size": 32,
        },
        process=kimi,
        clip=kimi_clip,
        mended=with_whole_clips,
        num_frames=4,
        renamed=(
            (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
            (r"^model\.mm_projector", "mm_projector"),
            (r"^vision_tower\.encoder\.patch_embed", "vision_tower.patch_embed"),
        ),
        files={"size": {"max_height": 12, "max_width": 12}, "max_patches": 40},
        video_files={"max_patches": 40},
    ),
    "llama4": PictureCase(
        name="Llama4",
        config={
            "vision_config": {
                **{**TOWER, "projector_input_dim": 28, "projector_output_dim": 28},
                **{"vision_output_dim": 28, "pixel_shuffle_ratio": 0.5, "intermediate_size": 128},
            },
            "text_config": text("llama4_text", num_local_experts=2, intermediate_size_mlp=64),
            "image_token_index": IMAGE,
        },
        process=llama4,
        files={"max_patches": 6},
        marks=LLAMA4_MARKS,
    ),
    "llava-next": PictureCase(
        name="LlavaNext", config={**NEXT, "text_config": text("llama")}, process=llava_next
    ),
    "llava-onevision": PictureCase(
        name="LlavaOnevision",
        config=ONEVISION,
        process=llava_onevision,
        files=HALF_NORM,
        sizes=((61, 90),),
        clip=onevision_clip,
    ),
    "llava-onevision-several": PictureCase(
        name="LlavaOnevision", config=ONEVISION, files=HALF_NORM, process=llava_onevision
    ),
}
