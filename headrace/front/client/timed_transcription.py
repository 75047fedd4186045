"""Speech to text by a model that says a token for each piece of a sound (Voxtral Realtime): most of
them say that nothing is said yet. The sound is added to the prompt's tokens and to those that are
said; when something is said, its token's place tells."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from headrace.base.config.media import MediaSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, Ended
from headrace.front.client.sound_prompt import prepared_window
from headrace.front.client.transcription import (
    Ask,
    Heard,
    Samples,
    SoundReader,
    SpeechRequest,
    Window,
)
from headrace.front.media.log_mel import HOP, RATE
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment

WINDOW_S = 600
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

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        if request.translates:
            raise InvalidRequest("this model writes what is said, and translates nothing")
        for field in ("language", "prompt"):
            if (value := getattr(request, field)) not in (None, ""):
                raise InvalidRequest(
                    f"{field}: {value[:30]!r} given; this model takes none", field=field
                )
        if request.words:
            raise InvalidRequest(
                "timestamp_granularities: this model tells no times of words; segment is allowed",
                field="timestamp_granularities",
            )

    async def heard(
        self,
        windows: AsyncGenerator[Window, None],
        request: SpeechRequest,
        ask: Ask,
        *,
        scores_silence: bool = False,
    ) -> AsyncGenerator[Heard, None]:
        """See SpeechModel; how likely silence is this model does not tell."""
        async with aclosing(windows):
            async for window in windows:
                yield await self._heard(window, request, ask)

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel."""
        async with aclosing(windows):
            async for window in windows:
                sound = await self._input(window)
                params = self._params(sound, request)
                async with aclosing(ask(self._prompt, params, (sound,))) as events:
                    async for event in events:
                        if isinstance(event, Delta) and event.text:
                            yield event.text

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        sound = await self._input(window)
        tokens, said, total = list[int](), "", 0.0
        async with aclosing(ask(self._prompt, self._params(sound, request), (sound,))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    said += event.text
                elif isinstance(event, Ended):
                    total = event.cumulative_logprob or 0.0
        data = said.encode()
        return Heard(
            window=window,
            text=said,
            segments=self._segments(window, tokens),
            temperature=request.temperature,
            mean_logprob=total / (len(tokens) + 1),
            compression=len(data) / max(1, len(zlib.compress(data))),
            num_prompt=len(self._prompt),
            num_output=len(tokens),
        )

    async def _input(self, window: Window) -> MediaInput:
        assert isinstance(window.sound, ProcessedMedia), "this model hears inputs"
        medium = await asyncio.to_thread(prepared_window, window.sound)
        return msgspec.structs.replace(medium.inputs[0], offset=0)

    def _params(self, sound: MediaInput, request: SpeechRequest) -> SamplingParams:
        """As many tokens as pieces are left."""
        return SamplingParams(
            temperature=request.temperature,
            max_tokens=max(1, sound.num_tokens - len(self._prompt)),
            logprobs=0,
        )

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
