"""What a task shows and asks: pictures or clips, and a conversation about them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from PIL import Image

HELD_OUT_SHARE = 8
"""One in so many things to read is never trained."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Frames of one size, `rate` of them a second."""

    frames: tuple[Image.Image, ...]
    rate: float


Medium = Image.Image | Clip


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A question and its answer; `task` says what it is counted as."""

    task: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Showing:
    """Media, and what is asked about them in this order."""

    media: tuple[Medium, ...]
    turns: tuple[Turn, ...]


def is_held_out(text: str) -> bool:
    """Whether a text to read is kept for evaluation."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0
