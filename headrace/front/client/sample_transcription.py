"""Speech to text by an encoder-decoder that reads sounds of any length: a window of half a minute
is what its encoder reads. The decoder begins with its start token, and there is nothing that it
could be asked for (Moonshine), or with tokens for the languages (front/text/speech_prompts.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from headrace.base.config.media import ProcessorSettings
from headrace.base.config.resolved import TextSpec
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, fold_written
from headrace.front.client.plain_transcription import (
    PlainTranscriber,
    check_untranslated,
    check_unused,
    check_without_words,
)
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import (
    Ask,
    Heard,
    Samples,
    Window,
)
from headrace.front.media.log_mel import HOP
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.text.speech_prompts import speech_prompt
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment


class SampleTranscriber(PlainTranscriber):
    """For one such model."""

    def __init__(self, text: TextSpec, tokenizer: Tokenizer) -> None:
        sound = text.hears
        assert sound is not None, "the encoder reads sounds of any length"
        super().__init__(sound.most if sound.waveform is not None else sound.most * HOP)
        # Its samples bound a window: one frame more may be made of them.
        self._settings = ProcessorSettings(sound=msgspec.structs.replace(sound, most=0))
        self._prompt = speech_prompt(text.speech_prompt, tokenizer, text.decoder_start)
        self._start = list(text.decoder_start)
        self._context = text.max_model_len

    def begins(self, request: SpeechRequest) -> list[int]:
        """The decoder's first tokens."""
        if self._prompt is None:
            return self._start
        return self._prompt.tokens(request.language, translates=request.translates)

    def _sound(self, samples: Samples) -> bytes:
        (one,) = spectrogram(samples, self._settings).inputs
        return one.rows.tobytes()

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        if self._prompt is None:
            check_untranslated(request)
            check_unused(request, "language")
        else:
            self._prompt.check(request.language, translates=request.translates)
        check_unused(request, "prompt")
        check_without_words(request)

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel."""
        async with aclosing(windows):
            async for window in windows:
                if window.start:
                    yield " "
                begins = self.begins(request)
                params = self._params(request, begins)
                async with aclosing(ask(begins, params, _bytes(window))) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            yield event.text

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        begins = self.begins(request)
        params = self._params(request, begins)
        written = await fold_written(ask(begins, params, _bytes(window)))
        said, ids = written.text, written.token_ids
        segment = SpeechSegment(start=window.start, end=window.end, text=said, tokens=ids)
        return Heard(
            window=window,
            text=f" {said}" if window.start else said,
            segments=[segment] if said.strip() else [],
            temperature=request.temperature,
            mean_logprob=written.mean_logprob,
            num_prompt=len(begins),
            num_output=len(ids),
        )

    def _params(self, request: SpeechRequest, begins: Sequence[int]) -> SamplingParams:
        return request.params(request.temperature, room=self._context - len(begins))


def _bytes(window: Window) -> bytes:
    assert isinstance(window.sound, bytes), "an encoder reads samples"
    return window.sound
