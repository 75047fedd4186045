"""What the models share that write what is said and can be asked for nothing else: a text for each
window by itself, and the refusals of what only Whisper's control tokens can ask for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.base.errors import InvalidRequest
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import Ask, Heard, SoundReader, Window


class PlainTranscriber(SoundReader):
    """A model that hears each window by itself; what one says its `_heard` tells."""

    async def heard(
        self,
        windows: AsyncGenerator[Window, None],
        request: SpeechRequest,
        ask: Ask,
        *,
        scores_silence: bool = False,
    ) -> AsyncGenerator[Heard, None]:
        """See SpeechModel; how likely silence is these models do not tell."""
        async with aclosing(windows):
            async for window in windows:
                yield await self._heard(window, request, ask)

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        """What a window says."""
        raise NotImplementedError


def check_untranslated(request: SpeechRequest) -> None:
    """InvalidRequest where a translation is asked for."""
    if request.translates:
        raise InvalidRequest("this model writes what is said, and translates nothing")


def check_unused(request: SpeechRequest, *fields: str, model: str = "this model") -> None:
    """InvalidRequest where one of these is stated; `model`: what it does instead."""
    for field in fields:
        if (value := getattr(request, field)) not in (None, ""):
            raise InvalidRequest(f"{field}: {value[:30]!r} given; {model} takes none", field=field)


def check_without_words(request: SpeechRequest) -> None:
    """InvalidRequest where times of words are asked for."""
    if request.words:
        raise InvalidRequest(
            "timestamp_granularities: this model tells no times of words; segment is allowed",
            field="timestamp_granularities",
        )
