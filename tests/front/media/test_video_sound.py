"""A video and its sound take turns as transformers' processors have it; files with both tracks (MUL-04)."""

from __future__ import annotations

import io
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from headrace.base.config.media import ProcessorSettings, SoundSettings, VideoSound
from headrace.front.media.job import DecodingLimits, MediaJob
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.video_sound import with_sound
from headrace.front.media.sound import samples_of, sound
from headrace.front.media.worker import _processed

AROUND = ("[", "]")
CHUNKS = VideoSound(per_s=25.0, chunk_s=2.0, around=AROUND)
TURNS = VideoSound(per_s=13.0, around=AROUND)


def medium(kind: str, grid: tuple[int, int, int], tokens: int, step_s: float) -> ProcessedMedia:
    rows = np.zeros((grid[0] * grid[1] * grid[2], 4), np.uint8)
    one = TowerInput(kind=kind, grid=grid, rows=rows, step_s=step_s, num_tokens=tokens)
    return ProcessedMedia(inputs=(one,), layout=(0,))


def written(whole: ProcessedMedia) -> str:
    pieces = []
    for piece in whole.layout:
        if isinstance(piece, tuple):
            pieces.append("VA"[piece[0]] * piece[2])
        else:
            pieces.append(str(piece))
    return "".join(pieces)


@pytest.mark.parametrize(("steps", "step_s"), [(1, 1.0), (5, 1.0), (4, 0.75), (3, 2.5)])
@pytest.mark.parametrize("tokens", [1, 49, 130])
@pytest.mark.parametrize(
    ("model", "how"), [(Qwen2_5OmniProcessor, CHUNKS), (Qwen3OmniMoeProcessor, TURNS)]
)
def test_tokens_take_turns(
    model: Any, how: VideoSound, steps: int, step_s: float, tokens: int
) -> None:
    grid = (steps, 2, 4)
    settings = ProcessorSettings(merge=2, sound=SoundSettings(bands=4, in_video=how))
    ours = with_sound(
        medium("video", grid, 0, step_s), medium("audio", (1, 1, 9), tokens, 0.0), settings
    )
    itself = SimpleNamespace(
        **{
            "video_processor": SimpleNamespace(merge_size=2),
            "video_token": "V",
            "audio_token": "A",
        },
        **{"audio_bos_token": "[", "audio_eos_token": "]"},
        get_chunked_index=lambda *args: Qwen2_5OmniProcessor.get_chunked_index(None, *args),
    )
    theirs = model.replace_video_with_audio_token(
        itself,
        {"video_grid_thw": np.array([grid]), "video_second_per_grid": [step_s]},
        0,
        {"num_audio_tokens": [tokens]},
        0,
        position_id_per_seconds=how.per_s,
        seconds_per_chunk=how.chunk_s,
    )
    assert written(ours) == theirs
    reached = [0, 0]
    for piece in ours.layout[1:-1]:
        assert isinstance(piece, tuple) and piece[1] == reached[piece[0]]
        reached[piece[0]] += piece[2]


def clip(seconds: int, *, hertz: float | None) -> bytes:
    """An MP4 of grey frames, with a tone or without sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=8)
        video.width = video.height = 32
        audio = container.add_stream("aac", rate=24_000) if hertz else None
        for number in range(8 * seconds):
            grey = np.full((32, 32, 3), 20 * number % 255, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(grey)))
        container.mux(video.encode(None))
        if audio is not None and hertz:
            time = np.arange(24_000 * seconds) / 24_000
            wave = (9000 * np.sin(2 * np.pi * hertz * time)).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(wave[None], format="s16", layout="mono")
            frame.rate, frame.time_base, frame.pts = 24_000, Fraction(1, 24_000), 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return file.getvalue()


def test_the_sound_of_a_file() -> None:
    """One channel of 16 kHz, whose loudest tone is that of the file; a video without sound is a video alone.
    REG-090."""
    data = clip(2, hertz=600.0)
    samples = samples_of(sound(data, DecodingLimits()))
    assert abs(len(samples) - 32_000) < 3000
    loudest = np.abs(np.fft.rfft(samples)).argmax() * 16_000 / len(samples)
    assert abs(loudest - 600.0) < 5
    settings = ProcessorSettings(
        patch=4,
        video_pixels=(16, 4096),
        sound=SoundSettings(bands=16, strides=((3, 1, 1), (3, 2, 1)), pool=2, in_video=CHUNKS),
        sound_of_video=True,
    )
    for file, parts in ((data, (0, 1)), (clip(2, hertz=None), (0,))):
        job = MediaJob(
            kind="video",
            family="qwen_vl",
            settings=settings,
            limits=DecodingLimits(),
            sizes=(len(file),),
        )
        (whole,) = _processed(job, [file])
        assert len(whole.inputs) == len(parts)
        assert written(whole).startswith("[V") if len(parts) > 1 else whole.layout == (0,)
