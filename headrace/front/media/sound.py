"""Bytes of clients to samples: PyAV, in the processes of `worker.py` alone. Containers are an
allow-list, recognised by the file's own first bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.base.optional import require
from headrace.front.media.job import DecodingLimits
from headrace.front.media.log_mel import RATE
from headrace.front.media.processing import ProcessedMedia, TowerInput

SAMPLE_BYTES = 2
LEAST_RATE, MOST_RATE = 1000, 768_000
"""Samples a second of a file: fewer or more are a fault of it, and costly to make others of."""
_STARTS = (
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)


def sound(data: bytes, limits: DecodingLimits) -> ProcessedMedia:
    """One channel of int16 samples at RATE, as rows of SAMPLE_BYTES."""
    av = require("av", extra="media", purpose="sound")
    try:
        with open_container(av, data, _container(data)) as container:
            samples = _decoded(av, container, limits)
    except HeadraceError:
        raise
    except Exception as error:
        raise InvalidRequest(f"the sound cannot be decoded: {error}"[:300]) from None
    if not samples.size:
        raise InvalidRequest("the file holds no sound")
    rows = samples.view(np.uint8).reshape(-1, SAMPLE_BYTES)
    one = TowerInput(kind="audio", grid=(1, 1, len(rows)), rows=rows)
    return ProcessedMedia(inputs=(one,), layout=(0,))


def has_sound(data: bytes) -> bool:
    """Whether a file of a video has sound too; what cannot be read as sound has none."""
    av = require("av", extra="media", purpose="sound")
    try:
        with open_container(av, data, _container(data)) as container:
            return bool(container.streams.audio)
    except Exception:
        return False


def open_container(av: Any, data: bytes, container: str | None) -> Any:
    """A file in memory. Titles may be in any encoding, none of them is read; what to do with them
    is said to PyAV before 19 alone, which knew no other way to go on."""
    old = int(av.__version__.partition(".")[0]) < 19
    titles = {"metadata_errors": "replace"} if old else {}
    return av.open(io.BytesIO(data), format=container, **titles)


def samples_of(medium: ProcessedMedia) -> np.ndarray:
    """The int16 samples of a sound."""
    return medium.inputs[0].rows.reshape(-1).view("<i2")


def _container(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    for at, start, name in _STARTS:
        if data[at : at + len(start)] == start:
            return name
    raise InvalidRequest("the sound is none of flac, mp3, mp4, m4a, ogg, wav, webm")


def _decoded(av: Any, container: Any, limits: DecodingLimits) -> np.ndarray:
    streams = container.streams.audio
    if not streams:
        raise InvalidRequest("the file holds no sound")
    rate = streams[0].rate or 0
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise InvalidRequest(
            f"sound of {rate} samples a second given; allowed: {LEAST_RATE} to {MOST_RATE}"
        )
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    pieces: list[np.ndarray] = []
    left = int(limits.seconds * RATE)
    for frame in _frames(container, streams[0]):
        for piece in resampler.resample(frame):
            pieces.append(piece.to_ndarray().reshape(-1))
            left -= pieces[-1].size
        if left < 0:
            raise InvalidRequest(f"sound of more than {limits.seconds:g} s given")
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int16)


def _frames(container: Any, stream: Any) -> Any:
    """The frames, and None, by which the resampler gives what it still holds."""
    yield from container.decode(stream)
    yield None
