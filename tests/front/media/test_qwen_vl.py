"""The processor against transformers' own: sizes, grids, patches, sampled frames and time stamps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from headrace.base.config.media import ProcessorSettings
from headrace.base.errors import InvalidRequest
from headrace.front.media.processing import MAX_PATCHES, Sampling
from headrace.front.media.processors.glm_v import Glm46VisionProcessor, GlmVisionProcessor
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor
from tests.front.media.oracles import without_torchvision
from tests.front.media.pictures import picture

SHAPES = ((14, 2), (16, 2))
BOUNDS = ((56 * 56, 28 * 28 * 1280), (64 * 64, 128 * 128), (65536, 16777216), (200_000, 220_000))
SIZES = ((1, 1), (28, 28), (29, 27), (57, 391), (640, 480), (333, 1023), (1920, 1080), (13, 2500))


def _video_module(family: str) -> Any:
    root = Path(transformers.__file__).parent / "models" / family
    name = f"transformers.models.{family}.video_processing_oracle"
    spec = importlib.util.spec_from_file_location(name, root / f"video_processing_{family}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with without_torchvision():
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
    return module


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    return {family: _video_module(family) for family in ("qwen2_vl", "qwen3_vl", "glm4v", "glm46v")}


@pytest.mark.covering(1)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_are_the_reference_s(shape: tuple[int, int], bounds: tuple[int, int]) -> None:
    """Pixel values within 1/255 after rescaling, grids and token counts, over odd sizes."""
    patch, merge = shape
    ours = QwenVisionProcessor(ProcessorSettings(patch=patch, merge=merge, image_pixels=bounds))
    theirs = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        size={"shortest_edge": bounds[0], "longest_edge": bounds[1]},
        do_normalize=False,
    )
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        expected = theirs(image, return_tensors="np")
        medium = ours.image(image)
        (one,) = medium.inputs
        assert list(one.grid) == expected["image_grid_thw"][0].tolist(), size
        values = expected["pixel_values"].reshape(len(one.rows), 3, 2, patch, patch)
        assert np.array_equal(values[:, :, 0], values[:, :, 1])
        rows = one.rows.reshape(-1, 3, patch, patch) / 255.0
        assert np.abs(rows - values[:, :, 0]).max() <= 1e-6, size
        assert medium.layout == (0,)


def test_twenty_images_of_a_prompt_are_each_processed_as_alone() -> None:
    ours = QwenVisionProcessor(ProcessorSettings())
    images = [picture(37 * i + 1, 1000 - 41 * i, i) for i in range(1, 21)]
    expected = Qwen2VLImageProcessorPil(do_normalize=False)(images, return_tensors="np")
    rows = [ours.image(image).inputs[0] for image in images]
    assert [list(one.grid) for one in rows] == expected["image_grid_thw"].tolist()
    values = expected["pixel_values"].reshape(-1, 3, 2, 196)[:, :, 0].reshape(-1, 588)
    assert np.abs(np.concatenate([one.rows for one in rows]) / 255.0 - values).max() <= 1e-6


def test_a_picture_too_long_for_its_width_is_refused_with_its_size() -> None:
    with pytest.raises(InvalidRequest, match="2010 x 10 pixels given; one side may be at most 200"):
        QwenVisionProcessor(ProcessorSettings()).image(Image.new("RGB", (2010, 10)))


def test_an_image_never_has_more_patches_than_an_input_may() -> None:
    ours = QwenVisionProcessor(ProcessorSettings(image_pixels=(3136, 10**9)))
    height, width = ours.image_size(9000, 9001)
    assert height * width // 196 <= MAX_PATCHES


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", range(1, 41))
@pytest.mark.parametrize("temporal", [1, 2, 3, 4])
def test_odd_frame_counts_repeat_the_last_frame(count: int, temporal: int, oracle: Any) -> None:
    """MUL-01: grid_t is the ceiling, rows and times follow the temporal patch. REG-086."""
    settings = ProcessorSettings(
        patch=4,
        merge=2,
        temporal=temporal,
        video_pixels=(64, 10**6),
        pixels_of_all_frames=True,
        stamped=True,
    )
    frames = [picture(16, 8, i) for i in range(count)]
    indices, rate = list(range(0, 3 * count, 3)), 7.0
    medium = QwenVisionProcessor(settings).video(iter(frames), indices, Sampling(3 * count, rate))
    pairs = -(-count // temporal)
    assert [one.grid for one in medium.inputs] == [(1, 2, 4)] * pairs
    times = Qwen3VLProcessor._calculate_timestamps(None, list(indices), rate, temporal)
    layout: list[str | int] = []
    for i, time_s in enumerate(times):
        layout += [f"<{time_s:.1f} seconds><|vision_start|>", i, "<|vision_end|>"]
    assert medium.layout == tuple(layout)
    pixels = torch.from_numpy(np.stack([np.asarray(f).transpose(2, 0, 1) for f in frames]))
    patchify = oracle["qwen3_vl"].Qwen3VLVideoProcessor.patchify
    expected, grid_t, _, _ = patchify(None, pixels[None], 4, 2, temporal)
    assert grid_t == pairs
    assert np.array_equal(np.concatenate([one.rows for one in medium.inputs]), expected[0].numpy())


@pytest.mark.parametrize("count", [2, 3, 8, 33])
def test_a_spaced_video_is_one_input_with_its_step(count: int, oracle: Any) -> None:
    settings = ProcessorSettings(patch=14, video_pixels=(28 * 28, 28 * 28 * 6))
    frames = [picture(100, 61, i) for i in range(count)]
    indices = list(range(0, 5 * count, 5))
    medium = QwenVisionProcessor(settings).video(iter(frames), indices, Sampling(5 * count, 25.0))
    (one,) = medium.inputs
    height, width = oracle["qwen2_vl"].smart_resize(61, 100, 28, 28 * 28, 28 * 28 * 6)
    assert one.grid == (-(-count // 2), height // 14, width // 14)
    assert one.step_s == pytest.approx(2 * 5 / 25.0)
    small = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    pixels = torch.from_numpy(np.stack([np.asarray(f).transpose(2, 0, 1) for f in small]))
    expected = oracle["qwen2_vl"].Qwen2VLVideoProcessor.patchify(None, pixels[None], 14, 2, 2)[0]
    assert np.array_equal(one.rows, expected[0].numpy())


def test_sizes_of_videos_are_the_reference_s(oracle: Any) -> None:
    resize = oracle["qwen3_vl"].smart_resize
    stamped = QwenVisionProcessor(
        ProcessorSettings(
            patch=16, video_pixels=(4096, 2_000_000), pixels_of_all_frames=True, stamped=True
        )
    )
    for count in (2, 3, 7, 64, 768):
        for height, width in ((9, 9), (360, 640), (1080, 1920), (700, 33)):
            expected = resize(count, height, width, 2, 32, 4096, 2_000_000)
            assert stamped.video_size(count, height, width) == expected, (count, height, width)


@pytest.mark.parametrize("rate", [1.0, 7.5, 24.0, 29.97, 60.0])
@pytest.mark.parametrize("total", [1, 2, 3, 5, 24, 100, 1001, 50_000])
def test_frames_are_sampled_as_the_reference_does(total: int, rate: float, oracle: Any) -> None:
    bounds = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "num_frames": None}
    facts = SimpleNamespace(total_num_frames=total, fps=rate)
    video = Sampling(total, rate)
    reference = oracle["qwen3_vl"].Qwen3VLVideoProcessor.sample_frames
    expected = reference(SimpleNamespace(**bounds), facts)
    stamped = QwenVisionProcessor(ProcessorSettings(stamped=True))
    assert stamped.frames_of(video) == expected.tolist()
    spaced = QwenVisionProcessor(ProcessorSettings())
    if total < 2:  # the reference divides by zero
        assert spaced.frames_of(video) == [0]
        return
    reference = oracle["qwen2_vl"].Qwen2VLVideoProcessor.sample_frames
    expected = reference(SimpleNamespace(**bounds, temporal_patch_size=2), facts)
    assert spaced.frames_of(video) == expected.tolist()


@pytest.mark.parametrize("rate", [1.0, 7.5, 24.0, 29.97])
@pytest.mark.parametrize("total", [1, 2, 3, 24, 101, 1001, 20_000])
def test_glm_s_frames_are_sampled_as_the_reference_does(
    total: int, rate: float, oracle: Any
) -> None:
    facts = SimpleNamespace(total_num_frames=total, fps=rate, duration=total / rate)
    own = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
    for family, ours in (("glm4v", GlmVisionProcessor), ("glm46v", Glm46VisionProcessor)):
        name = {"glm4v": "Glm4v", "glm46v": "Glm46V"}[family]
        reference = getattr(oracle[family], f"{name}VideoProcessor").sample_frames
        expected = reference(own, facts).tolist()
        assert ours(ProcessorSettings()).frames_of(Sampling(total, rate)) == expected, family


def test_glm_s_videos_have_the_reference_s_sizes_and_times(oracle: Any) -> None:
    settings = ProcessorSettings(patch=14, video_pixels=(112 * 112, 28 * 28 * 600))
    resize = oracle["glm4v"].smart_resize
    for ours, times in (
        (GlmVisionProcessor(settings), ("0", "1")),
        (Glm46VisionProcessor(settings), ("0.0 seconds", "1.4 seconds")),
    ):
        frames = [picture(100, 61, i) for i in range(3)]
        medium = ours.video(iter(frames), [0, 5, 10], Sampling(20, 7.0))
        height, width = resize(3, 61, 100, 2, 28, *settings.video_pixels)
        assert [one.grid for one in medium.inputs] == [(1, height // 14, width // 14)] * 2
        start, end = "<|begin_of_image|>", "<|end_of_image|>"
        assert medium.layout == (start, 0, end + times[0], start, 1, end + times[1])
        for count, high, wide in ((2, 9, 9), (64, 360, 640), (600, 1080, 1920)):
            expected = resize(count, high, wide, 2, 28, *settings.video_pixels)
            assert ours.video_size(count, high, wide) == expected
