"""More families in the form of picture_cases.py, whose images keep their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace.front.media.processing import ProcessedMedia
from tests.front.media.oracles import without_torchvision
from tests.models.picture_cases import CLIP, HALF_NORM, IMAGE, VIDEO, PictureCase, Pictures, Theirs
from tests.models.test_parity import CASES as TEXTS
from tests.models.test_towers import TOWER, text
from tests.models.vision_cases import GEMMA4_TEXT, GEMMA4_TOWER

with without_torchvision():
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
        pad_along_first_dim,
        patches_merge,
    )
    from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
    from transformers.models.smolvlm.processing_smolvlm import (
        SmolVLMProcessor,
        _prompt_single_image,
    )
    from transformers.models.video_llava.processing_video_llava import VideoLlavaProcessor

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


def gemma4(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    inputs = processor(list(pictures), return_tensors="pt")
    counts = inputs.pop("num_soft_tokens_per_image")
    texts = ["B" + "I" * int(count) + "E" for count in counts]
    return Theirs(given=dict(inputs), texts=texts, typed=True)


def gemma4_clip(frames: Pictures, ours: ProcessedMedia) -> Theirs:
    """The frames as its image processor gives pictures of so many tokens."""
    inputs = gemma4(frames, ()).given
    count = int((inputs["image_position_ids"][0, :, 0] >= 0).sum()) // 4
    metadata = SimpleNamespace(fps=0.4, timestamps=[i / 0.4 for i in range(len(frames))])
    self = SimpleNamespace(boi_token="B", eoi_token="E", video_token="V")
    text_of = Gemma4Processor.replace_video_token
    video = {"num_soft_tokens_per_video": [count], "video_metadata": [metadata]}
    given = {
        "pixel_values_videos": inputs["pixel_values"],
        "video_position_ids": inputs["image_position_ids"],
        "num_frames_per_video": torch.tensor([len(frames)]),
    }
    return Theirs(given=given, texts=[text_of(self, video, 0)], typed=True)


def smolvlm(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    """Not cut."""
    processor = Idefics3ImageProcessorPil(
        **HALF_NORM, size={"longest_edge": 24}, max_image_size={"longest_edge": 16},
        do_image_splitting=False,
    )  # fmt: skip
    inputs = processor([list(pictures)], return_tensors="pt")
    single = _prompt_single_image(
        4, fake_token_around_image="<fake_token_around_image>", image_token="I",
        global_image_token="<global-img>",
    )  # fmt: skip
    given = {"pixel_values": inputs["pixel_values"]}
    return Theirs(given=given, texts=[single] * len(pictures))


def smolvlm_clip(frames: Pictures, ours: ProcessedMedia) -> Theirs:
    """Its frames as pictures that are not cut; the number of frames is written as num2words does."""
    inputs = smolvlm(frames, ()).given
    metadata = SimpleNamespace(
        fps=0.04, timestamps=[i / 0.04 for i in range(len(frames))], duration=len(frames) / 0.04
    )
    self = SimpleNamespace(
        image_seq_len=4, image_token="I", fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )  # fmt: skip
    text_of = SmolVLMProcessor.replace_video_token
    with patch.dict(text_of.__globals__, {"num2words": {3: "three"}.__getitem__}):
        text = text_of(self, {**inputs, "video_metadata": [metadata]}, 0)
    return Theirs(given=inputs, texts=[text])


def blip(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    processor = BlipImageProcessorPil(size={"height": 16, "width": 16})
    values = processor(list(pictures), return_tensors="pt")["pixel_values"]
    return Theirs(given={"pixel_values": values}, texts=["I" * 5] * len(pictures))


def video_llava(pictures: Pictures, ours: Sequence[ProcessedMedia]) -> Theirs:
    """As CLIP's squares."""
    square = {"height": 16, "width": 16}
    processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square)
    values = processor(list(pictures), return_tensors="pt")["pixel_values"]
    self = SimpleNamespace(
        patch_size=4, num_additional_image_tokens=1, vision_feature_select_strategy="default",
        image_token="I",
    )  # fmt: skip
    given = {"pixel_values": values}
    texts = [VideoLlavaProcessor.replace_image_token(self, given, i) for i in range(len(pictures))]
    return Theirs(given=given, texts=texts)


def video_llava_clip(frames: Pictures, ours: ProcessedMedia) -> Theirs:
    given = {"pixel_values_videos": video_llava(frames, ()).given["pixel_values"][None]}
    self = SimpleNamespace(patch_size=4, num_additional_image_tokens=1, video_token="V")
    return Theirs(given=given, texts=[VideoLlavaProcessor.replace_video_token(self, given, 0)])


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
    "blip-2": PictureCase(
        name="Blip2",
        config={
            "vision_config": {**TOWER, "model_type": "blip_2_vision_model"},
            "qformer_config": {
                **{"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2},
                **{"intermediate_size": 40, "encoder_hidden_size": 32},
            },
            "text_config": {
                **{"model_type": "opt", "vocab_size": 120, "hidden_size": 48, "ffn_dim": 64},
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 48},
                **{"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2},
            },
            **{"image_token_index": IMAGE, "num_query_tokens": 5},
        },
        process=blip,
        reads=False,
        files={"size": {"height": 16, "width": 16}},
    ),
    "video-llava": PictureCase(
        name="VideoLlava",
        config={
            **{"vision_config": CLIP, "text_config": text("llama")},
            **{"image_token_index": IMAGE, "video_token_index": VIDEO},
        },
        process=video_llava,
        clip=video_llava_clip,
        files={"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    ),
    "smolvlm": PictureCase(
        name="SmolVLM",
        config={
            **{"vision_config": TOWER, "text_config": text("llama"), "image_token_id": IMAGE},
            **{"scale_factor": 2, "pad_token_id": 0},
        },
        process=smolvlm,
        clip=smolvlm_clip,
        rate=0.04,
        files={
            **{**HALF_NORM, "size": {"longest_edge": 24}, "do_image_splitting": False},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 24}},
        },
        marks={"<video>": VIDEO, "<fake_token_around_image>": 102, "<global-img>": 103},
    ),
    "gemma4": PictureCase(
        name="Gemma4",
        config={
            "vision_config": GEMMA4_TOWER,
            "text_config": {
                **GEMMA4_TEXT,
                "use_bidirectional_attention": "vision",
                "sliding_window": 9,
            },
            **{"image_token_id": IMAGE, "boi_token_id": 102, "eoi_token_id": 103},
            **{"video_token_id": VIDEO, "audio_config": None},
        },
        process=gemma4,
        clip=gemma4_clip,
        num_frames=2,
        rate=0.4,
        files={"max_soft_tokens": 70},
        video_files={"max_soft_tokens": 70},
        marks={"B": 102, "E": 103},
        sizes=((40, 26), (17, 50)),
        step_tokens=(90, 75),
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
