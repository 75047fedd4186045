"""Speech to text by a chat model that writes who says what, and when: a turn of sound alone, whose
answer is `[start][S01]text[end]` for each segment, times as seconds or with colons (MOSS
Transcribe-Diarize). A window has ten minutes; speakers are counted anew in each."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.base.config.media import MediaSpec
from headrace.base.config.resolved import TextSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Delta, Ended
from headrace.front.client.plain_transcription import (
    PlainTranscriber,
    check_untranslated,
    check_unused,
    check_without_words,
)
from headrace.front.client.sound_prompt import prepared_window
from headrace.front.client.transcription import Ask, Heard, Samples, SpeechRequest, Window
from headrace.front.media.log_mel import RATE
from headrace.front.media.placeholders import expanded
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import MediaMark
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment

WINDOW_S = 600
_SEGMENT = re.compile(r"\[([\d:.]{1,16})\]\[S(\d{1,4})\](.*?)\[([\d:.]{1,16})\]", re.DOTALL)


class DiarizingTranscriber(PlainTranscriber):
    """For one such model."""

    tells_speakers = True

    def __init__(
        self, text: TextSpec, media: MediaSpec, tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        super().__init__(WINDOW_S * RATE)
        self._media, self._tokenizer, self._template = media, tokenizer, template
        self._context = text.max_model_len

    def _sound(self, samples: Samples) -> ProcessedMedia:
        return spectrogram(samples, self._media.settings)

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        check_untranslated(request)
        check_without_words(request)
        check_unused(request, "language", model="this model hears which one it is and")

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        ids, media = await self._prompt(window, request)
        said, tokens, total = "", list[int](), 0.0
        longest = max(1, self._context - len(ids))
        params = SamplingParams(temperature=request.temperature, max_tokens=longest, logprobs=0)
        async with aclosing(ask(ids, params, media)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    said += event.text
                    tokens += event.token_ids
                elif isinstance(event, Ended):
                    total = event.cumulative_logprob or 0.0
        segments = diarized(said, window.start, window.end)
        text = " ".join(one.text for one in segments)
        data = text.encode()
        return Heard(
            window=window,
            text=f" {text}" if window.start else text,
            segments=segments,
            temperature=request.temperature,
            mean_logprob=total / (len(tokens) + 1),
            compression=len(data) / max(1, len(zlib.compress(data))),
            num_prompt=len(ids),
            num_output=len(tokens),
        )

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel. What a window says is told once it has been heard."""
        async with aclosing(self.heard(windows, request, ask)) as each:
            async for one in each:
                yield one.text

    async def _prompt(
        self, window: Window, request: SpeechRequest
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        content: list[object] = [MediaMark("audio")]
        if request.prompt.strip():
            content.append({"type": "text", "text": request.prompt.strip()})
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        ids = await self._template.render_async(messages, add_generation_prompt=True)
        assert isinstance(window.sound, ProcessedMedia), "a chat model hears inputs"
        medium = await asyncio.to_thread(prepared_window, window.sound)
        return expanded(ids, [medium], self._media, self._encode, field="file")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def diarized(said: str, begin_s: float, end_s: float) -> list[SpeechSegment]:
    """The segments of an answer, within the window; an answer of another form is one, of nobody."""
    segments = []
    for start, speaker, text, end in _SEGMENT.findall(said):
        times = [min(end_s, begin_s + seconds_of(one)) for one in (start, end)]
        segments.append(
            SpeechSegment(
                start=times[0],
                end=max(times),
                text=text.strip(),
                tokens=[],
                speaker=speaker_name(int(speaker)),
            )
        )
    if segments or not said.strip():
        return segments
    return [SpeechSegment(start=begin_s, end=end_s, text=said.strip(), tokens=[])]


def seconds_of(written: str) -> float:
    """Of 7.56, 1:23 or 01:02:03; what is none of these is 0."""
    try:
        parts = [float(one) for one in written.split(":")]
    except ValueError:
        return 0.0
    return sum(one * 60.0**place for place, one in enumerate(reversed(parts)))


def speaker_name(number: int) -> str:
    """A, B and so on, as OpenAI's clients know them; beyond Z by number."""
    return chr(ord("A") + number - 1) if 1 <= number <= 26 else f"S{number}"


def check_speakers(tells: bool) -> None:
    """InvalidRequest where who speaks is asked of a model that does not tell."""
    if not tells:
        raise InvalidRequest(
            "response_format: 'diarized_json' given; this model tells no speakers; allowed: json, "
            "text, srt, vtt, verbose_json",
            field="response_format",
        )
