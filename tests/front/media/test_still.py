"""Processors of images alone against transformers' own: LLaVA, Pixtral, InternVL, Idefics 3."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from headrace.base.errors import InvalidRequest
from headrace.front.media.processing import Processor, Sampling
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.oracles import without_torchvision
from tests.front.media.pictures import picture

with without_torchvision():
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

SIZES = ((1, 1), (16, 16), (29, 27), (57, 391), (640, 480), (333, 1023), (700, 60))


def processor_of(folder: Path, config: dict[str, Any], files: dict[str, Any]) -> Processor:
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    spec = read_media(folder, {"image_token_id": 7, **config})
    assert spec is not None and spec.image_token == 7 and spec.video_token is None
    return PROCESSORS.load(spec.processor)(spec.settings)


def test_a_checkpoint_that_names_no_placeholder_is_served_as_text(tmp_path: Path) -> None:
    config = {"model_type": "llava", "vision_config": {"image_size": 32, "patch_size": 8}}
    assert read_media(tmp_path, config) is None
    assert read_media(tmp_path, {"model_type": "llama", "image_token_id": 7}) is None


def pixels(rows: np.ndarray, grid: tuple[int, int, int], patch: int, merge: int) -> np.ndarray:
    """An input as [3, H, W] of 0 to 1."""
    _, h, w = grid
    windows = rows.reshape(h // merge, w // merge, merge, merge, 3, patch, patch)
    return windows.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, h * patch, w * patch) / 255.0


@pytest.mark.parametrize(
    "how",
    [
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {"size": {"height": 32, "width": 32}, "do_center_crop": False},
        {
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "do_pad": True,
            "image_mean": [0.48, 0.45, 0.40],
        },
    ],
)
def test_a_square_is_the_reference_s(how: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "llava", "vision_config": {"image_size": 32, "patch_size": 8}}
    ours = processor_of(tmp_path, config, how)
    theirs = LlavaImageProcessorPil(**how, do_normalize=False)
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        (one,) = ours.image(image).inputs
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        assert one.grid == (1, 4, 4)
        assert np.abs(pixels(one.rows, one.grid, 8, 1) - expected).max() <= 1 / 255, size


@pytest.mark.parametrize("bounds", [(112 * 112, 28 * 28 * 15000), (4096, 8192), (64, 64 * 64)])
def test_an_image_that_counts_as_two_frames_is_the_reference_s(
    bounds: tuple[int, int], tmp_path: Path
) -> None:
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
    vision = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    ours = processor_of(tmp_path, {"model_type": "glm4v", "vision_config": vision}, {"size": size})
    theirs = Glm4vImageProcessorPil(patch_size=8, merge_size=2, size=size, do_normalize=False)
    for seed, shape in enumerate(SIZES):
        image = picture(*shape, seed)
        (one,) = ours.image(image).inputs
        expected = theirs(image, return_tensors="np")
        assert list(one.grid) == expected["image_grid_thw"][0].tolist(), shape
        values = expected["pixel_values"].reshape(len(one.rows), 3, 2, 64)[:, :, 0]
        assert np.abs(one.rows.reshape(-1, 3, 64) / 255.0 - values).max() <= 1e-6, shape


@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral_keeps_ratios_and_breaks_rows(merge: int, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral", "image_size": 256, "patch_size": 8},
    }
    if merge > 1:
        config["spatial_merge_size"] = merge
    ours = processor_of(tmp_path, config, {"size": {"longest_edge": 200}})
    unit = 8 * merge
    theirs = PixtralImageProcessorPil(
        size={"longest_edge": 200}, patch_size={"height": unit, "width": unit}, do_normalize=False
    )
    tokens = SimpleNamespace(
        patch_size=8, spatial_merge_size=merge, image_token="I", image_break_token="B", image_end_token="E"
    )  # fmt: skip
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        medium = ours.image(image)
        (one,) = medium.inputs
        expected = theirs(image, return_tensors="np")
        values = pixels(one.rows, one.grid, 8, merge)
        assert np.abs(values - expected["pixel_values"][0]).max() <= 1e-6, size
        text = PixtralProcessor.replace_image_token(tokens, expected, 0)
        row = "I" * (one.grid[2] // merge)
        assert "B".join([row] * (one.grid[1] // merge)) + "E" == text
        assert medium.layout == (0, "[IMG_END]") and medium.row_break == "[IMG_BREAK]"
    with pytest.raises(InvalidRequest, match="9000 x 10 pixels given; one side may be at most 200"):
        ours.image(Image.new("RGB", (9000, 10)))


@pytest.mark.parametrize("tiles", [(1, 12), (1, 1), (2, 6), (1, 5)])
def test_tiles_are_the_reference_s(tiles: tuple[int, int], tmp_path: Path) -> None:
    """MUL-03."""
    vision = {"image_size": [32, 32], "patch_size": [8, 8]}
    how = {"min_patches": tiles[0], "max_patches": tiles[1]}
    ours = processor_of(tmp_path, {"model_type": "internvl", "vision_config": vision}, how)
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, **how, crop_to_patches=True, do_normalize=False
    )
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        medium = ours.image(image)
        expected = theirs(image, return_tensors="np")["pixel_values"]
        values = np.stack([pixels(one.rows, one.grid, 8, 2) for one in medium.inputs])
        assert values.shape == expected.shape, size
        assert np.abs(values - expected).max() <= 1e-6, size
        assert medium.layout == ("<img>", *range(len(expected)), "</img>")


def test_a_video_is_a_tile_for_each_of_its_frames(tmp_path: Path) -> None:
    """MUL-03."""
    vision = {"image_size": [32, 32], "patch_size": [8, 8]}
    ours = processor_of(tmp_path, {"model_type": "internvl", "vision_config": vision}, {})
    frames = [picture(50, 33, i) for i in range(3)]
    medium = ours.video(iter(frames), [1, 3, 5], Sampling(7, 2.0))
    assert [one.grid for one in medium.inputs] == [(1, 4, 4)] * 3
    assert medium.layout == (
        *("Frame1: <img>", 0, "</img>", "\nFrame2: <img>", 1, "</img>"),
        *("\nFrame3: <img>", 2, "</img>"),
    )
    for one, frame in zip(medium.inputs, frames, strict=True):
        small = np.asarray(frame.resize((32, 32), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        assert np.array_equal(pixels(one.rows, one.grid, 8, 2) * 255, small)
    assert ours.frames_of(Sampling(100, 25.0)) == [int(25 / 16 + i * 25 / 8) for i in range(32)]
    assert ours.frames_of(Sampling(3, 25.0)) == [0, 1, 2]


@pytest.mark.parametrize("splits", [True, False])
def test_tiles_with_their_places_are_the_reference_s(splits: bool, tmp_path: Path) -> None:
    vision = {"image_size": 32, "patch_size": 8}
    how = {"size": {"longest_edge": 128}, "do_image_splitting": splits}
    ours = processor_of(tmp_path, {"model_type": "idefics3", "vision_config": vision}, how)
    theirs = Idefics3ImageProcessorPil(
        **how, max_image_size={"longest_edge": 32}, do_normalize=False, return_row_col_info=True
    )
    names = SimpleNamespace(
        fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>", image_token="I", image_seq_len=4
    )  # fmt: skip
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        medium = ours.image(image)
        expected = theirs([[image]], return_tensors="np")
        values = np.stack([pixels(one.rows, one.grid, 8, 2) for one in medium.inputs])
        assert values.shape == expected["pixel_values"][0].shape, size
        assert np.abs(values - expected["pixel_values"][0]).max() <= 1e-6, size
        text = "".join(piece if isinstance(piece, str) else "IIII" for piece in medium.layout)
        assert text == Idefics3Processor.replace_image_token(names, expected, 0), size
