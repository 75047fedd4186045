"""Sound that a realtime session holds: what no turn has taken yet, and what waits for the decoder
of a text that grows. Both are bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt

from headrace.base.errors import InvalidRequest
from headrace.front.media.log_mel import RATE
from headrace.front.media.pcm import NONE, PcmStream
from headrace.front.media.voice import Turn, VoiceDetector
from headrace.front.server.openai.realtime_settings import RealtimeSettings

MOST_S = 600
"""Seconds of sound in a buffer."""
MOST = MOST_S * RATE
Samples = npt.NDArray[np.int16]


class InputBuffer:
    """Samples from `start` on, counted from the first of the session."""

    def __init__(self, settings: RealtimeSettings, *, start: int = 0) -> None:
        self.start = self.end = start
        self._chunks: list[Samples] = []
        self._stream = PcmStream(settings.encoding, settings.rate)
        self._detector = None
        if settings.voice is not None:
            self._detector = VoiceDetector(settings.voice, start=start)

    @property
    def num_bytes(self) -> int:
        """What is held."""
        return 2 * (self.end - self.start)

    @property
    def is_full(self) -> bool:
        """Whether a turn must end here."""
        return self.end - self.start >= MOST

    def append(self, data: bytes) -> list[Turn]:
        """The turns that begin and end with these bytes; InvalidRequest where they do not fit."""
        if self._detector is None and self.is_full:
            raise InvalidRequest(
                f"audio: the buffer holds {MOST_S} s, its limit; commit or clear it", field="audio"
            )
        return self._hold(self._stream.feed(data))

    def _hold(self, samples: Samples) -> list[Turn]:
        self._chunks.append(samples)
        self.end += len(samples)
        return [] if self._detector is None else self._detector.feed(samples)

    def forget_silence(self) -> None:
        """Drops what no turn will reach."""
        if self._detector is not None and not self._detector.speaking:
            self.take(self._detector.kept_from)

    def flush(self) -> None:
        """The client's turn ends here: what the resampler still holds belongs to it."""
        self._hold(self._stream.finish())
        if self._detector is not None:
            self._detector.restart()

    def take(self, until: int | None = None) -> Samples:
        """Takes the samples before `until`, by default all, out of the buffer."""
        held = np.concatenate(self._chunks) if self._chunks else NONE
        count = len(held) if until is None else max(0, until - self.start)
        self._chunks = [held[count:].copy()]
        self.start += count
        return held[:count]


class SampleQueue:
    """Samples on their way to a decoder, MOST of them at most: who brings more waits."""

    def __init__(self) -> None:
        self._chunks: deque[Samples] = deque()
        self._held = self.total = 0
        self._closed = False
        self._changed = asyncio.Condition()

    @property
    def is_full(self) -> bool:
        """Whether the next `put` waits."""
        return self._held >= MOST

    async def put(self, samples: Samples) -> None:
        """Adds some, once there is room."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_full)
            self._chunks.append(samples)
            self._held += len(samples)
            self.total += len(samples)
            self._changed.notify_all()

    async def close(self) -> None:
        """Nothing more comes."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def chunks(self) -> AsyncIterator[Samples]:
        """What was put, until it is closed."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._chunks) or self._closed)
                if not self._chunks:
                    return
                samples = self._chunks.popleft()
                self._held -= len(samples)
                self._changed.notify_all()
            yield samples
