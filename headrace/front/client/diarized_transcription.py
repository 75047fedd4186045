"""Speech to text by a chat model that writes who says what, and when: a turn of sound alone, whose
answer is `[start][S01]text[end]` for each segment, times as seconds or with colons (MOSS
Transcribe-Diarize). A window has ten minutes; speakers are counted anew in each."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.front.client.events import fold_written
from headrace.front.client.plain_transcription import (
    check_unused,
)
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import Ask, Heard, Window
from headrace.front.client.turn_transcription import TurnTranscriber
from headrace.front.text.media_parts import MediaMark
from headrace.front.text.transcript import SpeechSegment

_SEGMENT = re.compile(r"\[([\d:.]{1,16})\]\[S(\d{1,4})\](.*?)\[([\d:.]{1,16})\]", re.DOTALL)


class DiarizingTranscriber(TurnTranscriber):
    """For one such model."""

    tells_speakers = True
    window_s = 600

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        super().check(request)
        check_unused(request, "language", model="this model hears which one it is and")

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        ids, media = await self._prompt(window, request)
        written = await fold_written(ask(ids, self._params(ids, request), media))
        segments = diarized(written.text, window.start, window.end)
        text = " ".join(one.text for one in segments)
        return Heard(
            window=window,
            text=f" {text}" if window.start else text,
            segments=segments,
            temperature=request.temperature,
            mean_logprob=written.mean_logprob,
            num_prompt=len(ids),
            num_output=len(written.token_ids),
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
        return await self._expanded(ids, window)


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
