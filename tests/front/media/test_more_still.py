"""Processors of further families of images against transformers' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.base.errors import CheckpointError
from headrace.base.wire.media import MediaInput
from headrace.front.media.placeholders import PreparedMedium, expanded
from headrace.front.media.processing import Sampling
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.idefics3 import Idefics3Processor, number_words
from tests.front.media.oracles import without_torchvision
from tests.front.media.pictures import picture
from tests.front.media.test_still import SIZES, pixels, processor_of

with without_torchvision():
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata


@pytest.mark.parametrize(
    ("config", "theirs", "merge", "around"),
    [
        (
            {"model_type": "gemma3", "mm_tokens_per_image": 4},
            Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_normalize=False),
            2,
            ("\n\n<start_of_image>", "<end_of_image>\n\n"),
        ),
        (
            {"model_type": "paligemma"},
            SiglipImageProcessorPil(size={"height": 32, "width": 32}, do_normalize=False),
            1,
            (),
        ),
    ],
)
def test_squares_are_the_reference_s(
    config: dict[str, Any], theirs: Any, merge: int, around: tuple[str, ...], tmp_path: Path
) -> None:
    vision = {"image_size": 32, "patch_size": 8}
    ours = processor_of(tmp_path, {**config, "vision_config": vision}, {})
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        medium = ours.image(image)
        (one,) = medium.inputs
        values = pixels(one.rows, one.grid, 8, merge)
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        assert np.abs(values - expected).max() <= 1 / 255, size
        assert medium.layout == ((around[0], 0, around[1]) if around else (0,))


@pytest.mark.parametrize("tokens", [70, 280])
def test_gemma_4_s_images_keep_their_ratio(tokens: int, tmp_path: Path) -> None:
    vision = {"patch_size": 4, "pooling_kernel_size": 3}
    config = {"model_type": "gemma4", "vision_config": vision}
    ours = processor_of(tmp_path, config, {"max_soft_tokens": tokens})
    theirs = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=tokens)
    for seed, size in enumerate((*SIZES[1:], (3000, 10), (7, 900))):
        image = picture(*size, seed)
        (one,) = ours.image(image).inputs
        expected = theirs(image, return_tensors="np")
        assert expected["num_soft_tokens_per_image"][0] == one.grid[1] * one.grid[2] // 9, size
        values = pixels(one.rows, one.grid, 4, 3)
        flat = expected["pixel_values"][0][: one.grid[1] * one.grid[2]]
        flat = flat.reshape(one.grid[1], one.grid[2], 4, 4, 3).transpose(4, 0, 2, 1, 3)
        assert np.abs(values - flat.reshape(values.shape)).max() <= 1 / 255, size


def test_pan_and_scan_is_refused(tmp_path: Path) -> None:
    vision = {"image_size": 32, "patch_size": 8}
    (tmp_path / "preprocessor_config.json").write_text('{"do_pan_and_scan": true}')
    with pytest.raises(CheckpointError, match="do_pan_and_scan"):
        read_media(
            tmp_path, {"model_type": "gemma3", "image_token_index": 7, "vision_config": vision}
        )


NEWLINES = {count: 200 + count for count in range(1, 9)}
"""Tokens of so many newlines, as Gemma's tokenizer has them."""


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        run = len(text) - len(text.lstrip("\n"))
        if run:
            ids.append(NEWLINES[min(run, 8)])
            text = text[min(run, 8) :]
        else:
            ids.append(ord(text[0]))
            text = text[1:]
    return ids


@pytest.mark.parametrize("prompt", ["a\nX b", "aXX\n\nb", "\nX\nX", "XabX", "X"])
def test_newlines_around_images_are_the_tokens_of_their_text(prompt: str) -> None:
    spec = MediaSpec(
        processor="square",
        settings=ProcessorSettings(),
        image_token=7,
        video_token=None,
        image_mark=ord("X"),
        joins_newlines=True,
    )
    one = MediaInput(kind="image", key=bytes(32), offset=0, num_tokens=4, grid=(1, 2, 2))
    medium = PreparedMedium(kind="image", inputs=(one,), layout=("\n\n<", 0, ">\n\n"))
    media = [medium] * prompt.count("X")
    whole, inputs = expanded(encode(prompt), media, spec, encode, field="prompt")
    assert whole == encode(prompt.replace("X", "\n\n<\x07\x07\x07\x07>\n\n"))
    for each in inputs:
        assert whole[each.offset - 1 : each.offset + 5] == [ord("<"), 7, 7, 7, 7, ord(">")]
    again, same = expanded(whole, media, spec, encode, field="prompt")
    assert (again, same) == (whole, inputs)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *((1, "one"), (12, "twelve"), (20, "twenty"), (64, "sixty-four"), (100, "one hundred")),
        (219, "two hundred and nineteen"),
    ],
)
def test_numbers_of_frames_are_words(number: int, words: str) -> None:
    assert number_words(number) == words


@pytest.mark.parametrize(
    "video", [Sampling(3, 2.0), Sampling(240, 24.0), Sampling(2400, 24.0), Sampling(9000, 30.0)]
)
def test_smolvlm_s_frames_are_the_reference_s(video: Sampling) -> None:
    settings = ProcessorSettings(side=16, sizes=((24, 24),), max_frames=64, fps=1.0)
    ours = Idefics3Processor(settings).frames_of(video)
    self = SimpleNamespace(num_frames=64, fps=1)
    metadata = VideoMetadata(
        total_num_frames=video.num_frames,
        fps=video.rate,
        duration=video.num_frames / video.rate,
    )
    theirs = SmolVLMVideoProcessor.sample_frames(self, metadata)
    assert ours == theirs.tolist()


@pytest.mark.parametrize("size", [(40, 24), (96, 96), (97, 20), (150, 70), (400, 90), (90, 400)])
def test_deepseek_ocr_s_tiles_take_the_reference_s_tokens(
    size: tuple[int, int], tmp_path: Path
) -> None:
    """MOD-05: pictures to tiles to tokens: of a tile and of the whole so many queries each, and one row more."""
    files = {"size": {"height": 128, "width": 128}, "tile_size": 96}
    vision = {"sam_config": {"patch_size": 2}}
    ours = processor_of(tmp_path, {"model_type": "deepseek_ocr2", "vision_config": vision}, files)
    image = picture(*size, 1)
    theirs = DeepseekOcr2ImageProcessorPil(**files)([image], return_tensors="np")
    tiles = int(theirs["num_local_patches"][0])
    medium = ours.image(image)
    *cut, whole = medium.inputs
    assert [one.grid for one in cut] == [(1, 48, 48)] * tiles and whole.grid == (1, 64, 64)
    assert whole.num_tokens == 16**2 + 1 and all(not one.num_tokens for one in cut)
