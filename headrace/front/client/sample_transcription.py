"""Speech to text by an encoder-decoder that reads sounds of any length and whose text has no
control tokens (Moonshine): a window of half a minute is what its encoder reads, the decoder begins
with its start token, and there is nothing that it could be asked for."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.base.config.media import ProcessorSettings, SoundSettings, Waveform
from headrace.base.config.resolved import TextSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, Ended
from headrace.front.client.transcription import (
    Ask,
    Heard,
    Samples,
    SoundReader,
    SpeechRequest,
    Window,
)
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.text.transcript import SpeechSegment


class SampleTranscriber(SoundReader):
    """For one such model."""

    def __init__(self, text: TextSpec) -> None:
        values, frames, *strides = text.spectrogram
        assert values == 1, "a frame is a sample"
        super().__init__(frames)
        steps = tuple(zip(strides[::3], strides[1::3], strides[2::3], strict=True))
        sound = SoundSettings(bands=1, strides=steps, waveform=Waveform(normal=False))
        self._settings = ProcessorSettings(sound=sound)
        self._begins = list(text.decoder_start)
        self._longest = max(1, text.max_model_len - len(self._begins))

    def _sound(self, samples: Samples) -> bytes:
        (one,) = spectrogram(samples, self._settings).inputs
        return one.rows.tobytes()

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
                if window.start:
                    yield " "
                params = self._params(request)
                async with aclosing(ask(self._begins, params, _bytes(window))) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            yield event.text

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        said, tokens, total = "", list[int](), 0.0
        params = self._params(request)
        async with aclosing(ask(self._begins, params, _bytes(window))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    said += event.text
                    tokens += event.token_ids
                elif isinstance(event, Ended):
                    total = event.cumulative_logprob or 0.0
        text = f" {said}" if window.start else said
        segment = SpeechSegment(start=window.start, end=window.end, text=said, tokens=tokens)
        data = text.encode()
        return Heard(
            window=window,
            text=text,
            segments=[segment] if said.strip() else [],
            temperature=request.temperature,
            mean_logprob=total / (len(tokens) + 1),
            compression=len(data) / max(1, len(zlib.compress(data))),
            num_prompt=len(self._begins),
            num_output=len(tokens),
        )

    def _params(self, request: SpeechRequest) -> SamplingParams:
        return SamplingParams(temperature=request.temperature, max_tokens=self._longest, logprobs=0)


def _bytes(window: Window) -> bytes:
    assert isinstance(window.sound, bytes), "an encoder reads samples"
    return window.sound
