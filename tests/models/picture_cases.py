"""Families whose images become more than one input or other rows than their windows, each from a picture to logits: tiny
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
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import without_torchvision
from tests.models.test_towers import HALF, TOWER, text

with without_torchvision():
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )

IMAGE, VIDEO = 100, 101
Pictures = Sequence[Image.Image]


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """What transformers makes of pictures: what its model takes beside ids, and the text of each, in which `I` stands
    for the placeholder (`V`: for a video's)."""

    given: dict[str, Any]
    texts: list[str]


@dataclass(frozen=True, kw_only=True)
class PictureCase:
    """`marks`: ids of tokens in an image's text. `process`: transformers' processor; it is told what ours made too."""

    name: str
    config: dict[str, Any]
    process: Callable[[Pictures, Sequence[ProcessedMedia]], Theirs]
    files: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((40, 24), (17, 50))
    step_tokens: tuple[int, ...] = (7, 3)
    model: str = ""
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
    texts = [
        LlavaNextProcessor.replace_image_token(self, inputs, i) for i in range(len(pictures))
    ]
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
    mean, std = (
        np.array(one).reshape(1, 3, 1, 1)
        for one in HALF
    )
    values = torch.tensor((values - mean) / std)[None].float()
    self = SimpleNamespace(num_image_tokens=16, video_token="V")
    text = LlavaOnevisionProcessor.replace_video_token(self, {"pixel_values_videos": values}, 0)
    return Theirs(given={"pixel_values_videos": values}, texts=[text])


NEXT = {"vision_config": CLIP, "image_token_index": IMAGE, "image_grid_pinpoints": POINTS}
ONEVISION = {
    "vision_config": SIGLIP,
    "text_config": text("qwen2"),
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "image_grid_pinpoints": POINTS,
    "vision_aspect_ratio": "anyres_max_2",
}
CASES = {
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
