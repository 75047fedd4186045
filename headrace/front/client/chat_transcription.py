"""Speech to text by a chat model that is made for it (Qwen3-ASR): a turn of sound alone, whose
answer begins with the language, a mark, and then the text.

What the system says before it are words that may occur. A language that is asked for is put into
the model's mouth, with the mark.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.front.client.ctc_transcription import CtcTranscriber
from headrace.front.client.diarized_transcription import DiarizingTranscriber
from headrace.front.client.events import Delta, fold_written
from headrace.front.client.plain_transcription import (
    check_unused,
)
from headrace.front.client.sample_transcription import SampleTranscriber
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.timed_transcription import TimedTranscriber, is_in_time
from headrace.front.client.transcription import (
    Ask,
    Heard,
    SpeechModel,
    Transcriber,
    Window,
)
from headrace.front.client.turn_transcription import TurnTranscriber
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import MediaMark
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment

MARK = "<asr_text>"
NAMES = {
    **{"ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish"},
    **{"nl": "Dutch", "en": "English", "fil": "Filipino", "fi": "Finnish", "fr": "French"},
    **{"de": "German", "el": "Greek", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian"},
    **{"it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay"},
    **{"fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian"},
    **{"es": "Spanish", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese"},
}
"""What the model calls the languages it knows."""
_CODES = {name.lower(): code for code, name in NAMES.items()}


def transcriber_of(
    text: TextSpec, tokenizer: Tokenizer, template: ChatTemplate
) -> SpeechModel | None:
    """What turns speech into text with this model; None where it does not."""
    if text.hears is not None:
        return SampleTranscriber(text, tokenizer)
    if text.spectrogram:
        return Transcriber(text, tokenizer)
    if text.media is not None and text.media.blank is not None:
        return CtcTranscriber(text.media, tokenizer)
    if text.media is not None and is_in_time(text.media):
        return TimedTranscriber(text.media, tokenizer)
    if text.media is not None and text.media.speakers:
        return DiarizingTranscriber(text, text.media, tokenizer, template)
    if text.media is not None and text.media.transcribes:
        return ChatTranscriber(text, text.media, tokenizer, template)
    return None


class ChatTranscriber(TurnTranscriber):
    """For one such model."""

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        super().check(request)
        if self._media.asks:
            check_unused(request, "language", model="this model hears which one it is and")
        if request.language is not None and request.language.lower() not in NAMES:
            raise InvalidRequest(
                f"language: {request.language[:30]!r} given; known: {', '.join(sorted(NAMES))}",
                field="language",
            )

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        ids, media = await self._prompt(window, request)
        written = await fold_written(ask(ids, self._params(ids, request), media))
        language, text = parsed(written.text, request.language)
        segment = SpeechSegment(
            start=window.start, end=window.end, text=text, tokens=written.token_ids
        )
        return Heard(
            window=window,
            text=text,
            segments=[segment] if text.strip() else [],
            temperature=request.temperature,
            mean_logprob=written.mean_logprob,
            num_prompt=len(ids),
            num_output=len(written.token_ids),
            language=language,
        )

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel."""
        async with aclosing(windows):
            async for window in windows:
                ids, media = await self._prompt(window, request)
                said, shown = "", 0
                async with aclosing(ask(ids, self._params(ids, request), media)) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            said += event.text
                            tells = not self._media.asks and request.language is None
                            if tells and MARK not in said:
                                continue  # what the language is
                            text = parsed(said, request.language)[1]
                            yield text[shown:]
                            shown = len(text)
                yield parsed(said, request.language)[1][shown:]

    async def _prompt(
        self, window: Window, request: SpeechRequest
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """The turn's ids, and what its placeholders stand for."""
        messages: list[dict[str, object]] = [{"role": "user", "content": [MediaMark("audio")]}]
        if self._media.asks:
            asked = {"type": "text", "text": request.prompt.strip() or self._media.asks}
            messages = [{"role": "user", "content": [asked, MediaMark("audio")]}]
        elif request.prompt.strip():
            messages.insert(0, {"role": "system", "content": request.prompt.strip()})
        ids = await self._template.render_async(messages, add_generation_prompt=True)
        if request.language is not None:
            ids = [*ids, *self._encode(f"language {NAMES[request.language.lower()]}{MARK}")]
        return await self._expanded(ids, window)


def parsed(said: str, asked: str | None) -> tuple[str, str]:
    """The language's code and the text of an answer: `language NAME<asr_text>TEXT`, or the text
    alone where the language was put into the model's mouth."""
    head, mark, text = said.partition(MARK)
    if asked is not None or not mark:
        return asked or "", text if mark else said
    name = head.strip().removeprefix("language ").strip().lower()
    return _CODES.get(name, name if name != "none" else ""), text
