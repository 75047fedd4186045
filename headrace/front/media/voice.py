"""Where somebody speaks in sound that is still arriving: the energy of frames above that of the
background.

A frame of 20 ms is louder than the background, the quietest frame of the last 3 s, by so many
decibels; 10 dB above it speech is as likely as not, 14 dB is four to one. (The background as a
minimum over time: Martin 2001, section III.) Speech begins with 60 ms of frames that are likely,
and ends with a silence: frames less likely than `threshold` less HYSTERESIS.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.front.media.log_mel import RATE

FRAME = RATE // 50
"""Samples of a frame."""
MEMORY = 150
"""Frames of which the quietest is the background."""
EVEN_DB = 10.0
SCALE_DB = 3.0
QUIETEST_DB, LOUDEST_DB = -60.0, -30.0
"""What the background may be, in decibels below full scale."""
HYSTERESIS = 0.15
BEGINNING = 3
"""Likely frames in a row with which speech begins."""


class VoiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`threshold`: how likely speech must be, 0 to 1; `prefix_ms` before its first frame belong to
    it; `silence_ms` end it."""

    threshold: float = 0.5
    prefix_ms: int = 300
    silence_ms: int = 500


@dataclass(frozen=True)
class Turn:
    """Speech began or ended at this sample, counted from the first of all."""

    begins: bool
    at: int


class VoiceDetector:
    """Reads samples in pieces of any size; what it finds does not depend on them."""

    def __init__(self, settings: VoiceSettings, *, start: int = 0) -> None:
        self._settings = settings
        self._prefix = settings.prefix_ms * RATE // 1000
        self._silence = max(1, settings.silence_ms * RATE // 1000 // FRAME)
        self._levels = deque([QUIETEST_DB] * MEMORY, maxlen=MEMORY)
        self._rest = np.zeros(0, np.int16)
        self._at = self._start = start
        self._count = 0
        self.speaking = False

    @property
    def kept_from(self) -> int:
        """Samples before this one no turn will ever reach."""
        return max(self._start, self._at - BEGINNING * FRAME - self._prefix)

    def feed(self, samples: npt.NDArray[np.int16]) -> list[Turn]:
        """The turns that are known with these samples."""
        samples = np.concatenate([self._rest, samples])
        whole = len(samples) // FRAME * FRAME
        self._rest = samples[whole:]
        frames = samples[:whole].reshape(-1, FRAME).astype(np.float64) / 32768.0
        powers = np.maximum(frames.var(axis=1), 1e-10)
        return [turn for level in 10 * np.log10(powers) if (turn := self._next(float(level)))]

    def restart(self) -> None:
        """What was said until now belongs to nobody's turn any more."""
        self._start = self._at
        self._count, self.speaking = 0, False

    def _next(self, level: float) -> Turn | None:
        self._at += FRAME
        self._levels.append(level)
        background = min(max(min(self._levels), QUIETEST_DB), LOUDEST_DB)
        likely = 1 / (1 + np.exp(-(level - background - EVEN_DB) / SCALE_DB))
        if self.speaking:
            quiet = likely < self._settings.threshold - HYSTERESIS
            self._count = self._count + 1 if quiet else 0
            if self._count < self._silence:
                return None
            self.restart()
            return Turn(begins=False, at=self._at)
        self._count = self._count + 1 if likely >= self._settings.threshold else 0
        if self._count < BEGINNING:
            return None
        begin = max(self._start, self._at - BEGINNING * FRAME - self._prefix)
        self._count, self.speaking = 0, True
        return Turn(begins=True, at=begin)
