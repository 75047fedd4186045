"""A video and its sound as one medium: their tokens take turns by time, as transformers 5.23 has it
(processing_qwen2_5_omni.py, processing_qwen3_omni_moe.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headrace.base.config.media import ProcessorSettings, VideoSound
from headrace.front.media.processing import Layout, ProcessedMedia

Times = npt.NDArray[np.float64]
Part = tuple[int, int, int]
SEEN, HEARD = 0, 1
"""Indices of the two inputs."""


def with_sound(
    video: ProcessedMedia, sound: ProcessedMedia, settings: ProcessorSettings
) -> ProcessedMedia:
    """One medium of both; each a single input."""
    (seen,), (heard,) = video.inputs, sound.inputs
    assert settings.sound is not None and settings.sound.in_video is not None
    how = settings.sound.in_video
    steps, height, width = seen.grid
    each = height * width // settings.merge**2
    time_N = np.repeat(np.arange(steps) * seen.step_s * how.per_s, each)
    parts = list(_turns(time_N, np.arange(heard.num_tokens, dtype=np.float64), how))
    before, behind = how.around
    layout: Layout = (before, *parts, behind) if before else tuple(parts)
    return ProcessedMedia(inputs=(seen, heard), layout=layout)


def _turns(seen_N: Times, heard_N: Times, how: VideoSound) -> Iterator[Part]:
    """Parts of the two, by the times of their tokens."""
    places = [0, 0]
    for index, count in _counts(seen_N, heard_N, how):
        if count:
            yield index, places[index], count
            places[index] += count


def _counts(seen_N: Times, heard_N: Times, how: VideoSound) -> Iterator[tuple[int, int]]:
    """Which of the two comes next, and how many of its tokens."""
    if how.chunk_s:
        size = int(how.per_s * how.chunk_s)
        chunks = [_chunks(one, size) for one in (seen_N, heard_N)]
        for number in range(max(map(len, chunks))):
            for index, own in enumerate(chunks):
                yield index, own[number] if number < len(own) else 0
        return
    at = 0
    for time, count in zip(*np.unique(seen_N, return_counts=True), strict=True):
        reached = min(len(heard_N), int(np.searchsorted(heard_N, time, side="left")))
        yield HEARD, reached - at
        yield SEEN, int(count)
        at = reached
    yield HEARD, len(heard_N) - at


def _chunks(time_N: Times, size: int) -> list[int]:
    """Tokens of each chunk: one that reaches the end of the chunk before it begins a new one."""
    counts, first, chunk = [], 0, 1
    for place, time in enumerate(time_N.tolist()):
        if time >= chunk * size:
            counts.append(place - first)
            first, chunk = place, chunk + 1
    return [*counts, len(time_N) - first]
