"""What chat models share that write what is said: a turn around each window of sound, and the
answer to it."""

from __future__ import annotations

import asyncio

from headrace.base.config.media import MediaSpec
from headrace.base.config.resolved import TextSpec
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.plain_transcription import (
    PlainTranscriber,
    check_untranslated,
    check_without_words,
)
from headrace.front.client.sound_prompt import prepared_window
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import Samples, Window
from headrace.front.media.log_mel import RATE
from headrace.front.media.placeholders import expanded
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.tokenizer import Tokenizer


class TurnTranscriber(PlainTranscriber):
    """A chat model; `window_s`: seconds of sound in a turn."""

    window_s = 30

    def __init__(
        self, text: TextSpec, media: MediaSpec, tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        super().__init__(self.window_s * RATE)
        self._media, self._tokenizer, self._template = media, tokenizer, template
        self._context = text.max_model_len

    def _sound(self, samples: Samples) -> ProcessedMedia:
        return spectrogram(samples, self._media.settings)

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        check_untranslated(request)
        check_without_words(request)

    def _params(self, ids: list[int], request: SpeechRequest) -> SamplingParams:
        return request.params(request.temperature, room=self._context - len(ids))

    async def _expanded(
        self, ids: list[int], window: Window
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """The turn's ids with those of the sound, and what these stand for."""
        assert isinstance(window.sound, ProcessedMedia), "a chat model hears inputs"
        medium = await asyncio.to_thread(prepared_window, window.sound)
        return expanded(ids, [medium], self._media, self._encode, field="file")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
