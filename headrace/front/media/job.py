"""What the processes that decode media are asked, and what they answer."""

from __future__ import annotations

import struct

import msgspec

from headrace.base.config.media import ProcessorSettings
from headrace.base.wire.media import MediaCut
from headrace.front.media.processing import Layout

LENGTHS = struct.Struct("<IQ")
FRAMES_RATE = 2.0


class DecodingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one file: `pixels` of an image, a frame or a page; `frames` and `seconds` of a
    video; `pages` of a document. `time_s` and `memory_bytes` bound the process that decodes it."""

    pixels: int = 100_000_000
    frames: int = 200_000
    seconds: float = 7200.0
    pages: int = 100
    time_s: float = 30.0
    memory_bytes: int = 3 << 30


class MediaJob(msgspec.Struct, frozen=True, kw_only=True):
    """One medium: `kind` image, video, frames, pages or audio (without a family: its samples);
    `sizes` in bytes of the files behind it. `rate`: of the frames."""

    kind: str
    family: str
    settings: ProcessorSettings
    limits: DecodingLimits
    sizes: tuple[int, ...]
    rate: float = FRAMES_RATE


class InputShape(msgspec.Struct, frozen=True, kw_only=True):
    """A `TowerInput` without its rows, of which there are grid-many of `row_bytes`."""

    kind: str
    grid: tuple[int, int, int]
    row_bytes: int
    step_s: float
    num_tokens: int = 0
    cut: MediaCut | None = None


class MediumReply(msgspec.Struct, frozen=True, kw_only=True):
    """One `ProcessedMedia`."""

    inputs: tuple[InputShape, ...]
    layout: Layout
    row_break: str = ""
    row: tuple[int, int] = (0, 0)


class JobReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job: an error, or media (a document has several)."""

    error: str = ""
    media: tuple[MediumReply, ...] = ()
