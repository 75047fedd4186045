"""How many tokens media of usual sizes take, without a run: what `headrace plan` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.config.media import MediaSpec
from headrace.base.errors import InvalidRequest
from headrace.base.optional import available
from headrace.front.media.log_mel import RATE
from headrace.front.media.processing import ProcessedMedia, Sampling
from headrace.front.media.processors.families import PROCESSORS
from headrace.front.media.processors.spectrogram import spectrogram

if TYPE_CHECKING:
    from PIL import Image

PICTURES = ((256, 256), (1024, 1024), (1920, 1080))
CLIP = (640, 360, 240, 24.0)
"""Width, height, frames, and frames a second."""
SECONDS = (1, 10, 30)


def media_counts(spec: MediaSpec) -> tuple[tuple[str, int], ...]:
    """Each medium and its placeholders, those of text around and between them left out; what the
    model takes in no such size is not among them."""
    return (*_seen(spec), *_heard(spec))


def _seen(spec: MediaSpec) -> Iterator[tuple[str, int]]:
    if spec.image_token is None or not available("PIL"):
        return
    from PIL import Image

    processor = PROCESSORS.load(spec.processor)(spec.settings)
    for width, height in PICTURES:
        picture = Image.new("RGB", (width, height))
        yield f"image {width} x {height}", _placeholders(processor.image(picture), spec)
    if spec.video_token is None:
        return
    width, height, frames, rate = CLIP
    clip = Sampling(num_frames=frames, rate=rate)
    indices = processor.frames_of(clip)

    def pictures() -> Iterator[Image.Image]:
        for _ in indices:
            yield Image.new("RGB", (width, height))

    label = f"video {width} x {height}, {frames / rate:g} s"
    yield label, _placeholders(processor.video(pictures(), indices, clip), spec)


def _heard(spec: MediaSpec) -> Iterator[tuple[str, int]]:
    if spec.settings.sound is None:
        return
    for seconds in SECONDS:
        try:
            heard = spectrogram(np.zeros(seconds * RATE, np.int16), spec.settings)
        except InvalidRequest:
            continue
        yield f"sound {seconds} s", _placeholders(heard, spec)


def _placeholders(medium: ProcessedMedia, spec: MediaSpec) -> int:
    merged = spec.settings.merge**2
    counts = [
        one.num_tokens or one.grid[0] * one.grid[1] * one.grid[2] // merged for one in medium.inputs
    ]
    return sum(counts)
