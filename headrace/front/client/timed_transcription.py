"""Speech to text by a model that says a token for each piece of a sound (Voxtral Realtime): most of
them say that nothing is said yet. The sound is added to the prompt's tokens and to those that are
said; when something is said, its token's place tells.

Sound that arrives is heard as it comes, a second at a time: what was said of its beginning does not
change with what follows, so that the next request begins behind it, and the text is that of the
whole. Marks say so to the prefix cache: of each second only what is new is computed by the decoder,
while the encoder hears the window again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
import numpy as np

from headrace.base.config.media import MediaSpec
from headrace.base.wire.media import MARK_BYTES, MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, Ended
from headrace.front.client.plain_transcription import (
    check_untranslated,
    check_unused,
    check_without_words,
)
from headrace.front.client.sound_prompt import prepared_window
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import (
    Ask,
    Heard,
    Samples,
    SoundReader,
    Window,
)
from headrace.front.media.log_mel import HOP, RATE, WINDOW
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.media.quiet import first_cut
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment

WINDOW_S = 600
LIVE_S = 60
"""The longest window of sound that arrives: all of it is read again for each second of it."""
LIVE_PIECES = 12
"""New ones for which the model is asked."""
SEEN_BEHIND = WINDOW // 2
"""Samples behind its place that a frame sees."""
PAUSE = 10
"""Pieces without text between two segments."""


def is_in_time(media: MediaSpec) -> bool:
    """Whether a model is one of these."""
    return media.settings.sound is not None and media.settings.sound.in_time is not None


class TimedTranscriber(SoundReader):
    """For one such model."""

    def __init__(self, media: MediaSpec, tokenizer: Tokenizer) -> None:
        super().__init__(WINDOW_S * RATE)
        assert media.settings.sound is not None and media.settings.sound.in_time is not None
        self._media, self._tokenizer = media, tokenizer
        self._how = media.settings.sound.in_time
        self._prompt = [self._how.first, *[self._how.pad] * (self._how.lead + self._how.delay)]

    def _sound(self, samples: Samples) -> ProcessedMedia:
        return spectrogram(samples, self._media.settings)

    async def windows_as_they_come(
        self, chunks: AsyncIterator[Samples]
    ) -> AsyncGenerator[Window, None]:
        """See SpeechModel: windows that are not complete yet among them."""
        begin, seen, left = 0, 0, np.zeros(0, np.int16)
        step = LIVE_PIECES * self._how.piece * HOP
        async for chunk in chunks:
            left = np.concatenate([left, chunk])
            while (cut := first_cut(left, LIVE_S * RATE)) is not None:
                yield await self._window(left[:cut], begin)
                begin, seen, left = begin + cut, 0, left[cut:]
            if len(left) - seen >= step:
                seen = len(left)
                yield await self._beginning(left, begin)
        yield await self._window(left, begin)

    async def _beginning(self, samples: Samples, begin: int) -> Window:
        """A window of which more will come: the pieces that nothing that follows can change."""
        sound = await asyncio.to_thread(self._heard_so_far, samples)
        end = (begin + len(samples)) / RATE
        return Window(start=begin / RATE, end=end, sound=sound, complete=False)

    def _heard_so_far(self, samples: Samples) -> ProcessedMedia:
        (whole,) = self._sound(samples).inputs
        known = self._how.lead + (len(samples) - SEEN_BEHIND) // HOP // self._how.piece
        count = max(1, min(known, whole.num_tokens or 1))
        frames = count * self._how.piece
        rows = np.ascontiguousarray(whole.rows[:frames])
        grid = (1, 1, frames)
        one = msgspec.structs.replace(whole, grid=grid, rows=rows, num_tokens=count)
        return ProcessedMedia(inputs=(one,), layout=(0,))

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        check_untranslated(request)
        check_unused(request, "language", "prompt")
        check_without_words(request)

    async def heard(
        self,
        windows: AsyncGenerator[Window, None],
        request: SpeechRequest,
        ask: Ask,
        *,
        scores_silence: bool = False,
    ) -> AsyncGenerator[Heard, None]:
        """See SpeechModel; how likely silence is this model does not tell. Of windows that are not
        complete only what is new."""
        said, shown = list[int](), 0
        async with aclosing(windows):
            async for window in windows:
                one = await self._heard(window, request, ask, said)
                text = self._written(said)
                if window.complete or not text.endswith("\ufffd"):
                    one, shown = replace(one, text=text[shown:]), len(text)
                    yield one
                if window.complete:
                    said, shown = [], 0

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel."""
        async with aclosing(windows):
            async for window in windows:
                sound = await self._input(window)
                params = self._params(sound, request, [])
                async with aclosing(ask(self._prompt, params, (sound,))) as events:
                    async for event in events:
                        if isinstance(event, Delta) and event.text:
                            yield event.text

    async def _heard(
        self, window: Window, request: SpeechRequest, ask: Ask, said: list[int]
    ) -> Heard:
        """What is said of a window behind `said`, which grows by it."""
        sound = await self._input(window)
        prompt, known, total = [*self._prompt, *said], len(said), 0.0
        if sound.num_tokens > len(prompt):
            params = self._params(sound, request, said)
            async with aclosing(ask(prompt, params, (sound,))) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        said += event.token_ids
                    elif isinstance(event, Ended):
                        total = event.cumulative_logprob or 0.0
        text = self._written(said)
        return Heard(
            window=window,
            text=text,
            segments=self._segments(window, said) if window.complete else [],
            temperature=request.temperature,
            mean_logprob=total / (len(said) - known + 1),
            num_prompt=0 if known else len(self._prompt),
            num_output=len(said) - known,
        )

    def _written(self, tokens: Sequence[int]) -> str:
        special = self._tokenizer.special_ids
        return self._tokenizer.decode([token for token in tokens if token not in special])

    async def _input(self, window: Window) -> MediaInput:
        assert isinstance(window.sound, ProcessedMedia), "this model hears inputs"
        medium = await asyncio.to_thread(prepared_window, window.sound)
        (one,) = window.sound.inputs
        marks = await asyncio.to_thread(marks_of, one.rows, self._how.piece)
        return msgspec.structs.replace(medium.inputs[0], offset=0, marks=marks)

    def _params(
        self, sound: MediaInput, request: SpeechRequest, said: Sequence[int]
    ) -> SamplingParams:
        """As many tokens as pieces are left."""
        room = sound.num_tokens - len(self._prompt) - len(said)
        return request.params(request.temperature, room=room)

    def _segments(self, window: Window, tokens: Sequence[int]) -> list[SpeechSegment]:
        """Texts between pauses. A token is said when the piece `delay` before it was heard."""
        special = self._tokenizer.special_ids
        at = [place for place, token in enumerate(tokens) if token not in special]
        runs: list[list[int]] = []
        for place in at:
            if runs and place - runs[-1][-1] < PAUSE:
                runs[-1].append(place)
            else:
                runs.append([place])
        piece_s = self._how.piece * HOP / RATE
        segments = []
        for run in runs:
            ids = [tokens[place] for place in run]
            start = window.start + run[0] * piece_s
            segment = SpeechSegment(
                start=min(start, window.end),
                end=min(window.start + (run[-1] + 1) * piece_s, window.end),
                text=self._tokenizer.decode(ids),
                tokens=ids,
            )
            if segment.text.strip():
                segments.append(segment)
        return segments


def marks_of(rows: np.ndarray, piece: int) -> bytes:
    """`MediaSpan.marks` of frames, so many of which are a token."""
    digest = hashlib.sha256()
    marks = []
    for at in range(0, len(rows) // piece * piece, piece):
        digest.update(rows[at : at + piece].tobytes())
        marks.append(digest.copy().digest()[:MARK_BYTES])
    return b"".join(marks)
