"""Speech to text by a model that labels frames (CTC): the likeliest label of each frame, repeated
ones once, without blanks (Graves et al. 2006, section 3.2); or by a transducer, whose frames emit
tokens. It is not asked in words, and so takes
neither a language nor a prompt; when each word is said, its frames tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from headrace.base.config.ctc import NUMBERS
from headrace.base.config.media import MediaSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import SamplingParams
from headrace.front.client.plain_transcription import (
    PlainTranscriber,
    check_untranslated,
    check_unused,
)
from headrace.front.client.pooling import NO_TOKENS, Float32, fold_pooled, probabilities
from headrace.front.client.sound_prompt import prepared_window
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.client.transcription import (
    Ask,
    Heard,
    PooledSound,
    Samples,
    Window,
)
from headrace.front.media.log_mel import RATE
from headrace.front.media.placeholders import expanded
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.spectrogram import frame_s, spectrogram
from headrace.front.text.alignment import TimedWord
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment

WINDOW_S = 30
EVERY_FRAME = RowPooling(how="tokens", head=True)


@dataclass(frozen=True, slots=True)
class Label:
    """A label that is heard from frame `first` to before frame `end`, and its log-probability."""

    id: int
    first: int
    end: int
    score: float


class CtcTranscriber(PlainTranscriber):
    """For one such model."""

    def __init__(self, media: MediaSpec, tokenizer: Tokenizer) -> None:
        super().__init__(WINDOW_S * RATE)
        assert media.blank is not None and media.settings.sound is not None
        self._media, self._tokenizer, self._blank = media, tokenizer, media.blank
        self._frame_s = frame_s(media.settings.sound)

    def _sound(self, samples: Samples) -> ProcessedMedia:
        return spectrogram(samples, self._media.settings)

    def check(self, request: SpeechRequest) -> None:
        """See SpeechModel."""
        check_untranslated(request)
        check_unused(request, "language", "prompt", model="this model labels frames and")
        if request.sampling != SamplingParams():
            raise InvalidRequest("this model samples nothing: leave out how text is sampled")
        if request.temperature:
            raise InvalidRequest(
                f"temperature: {request.temperature} given; this model samples nothing",
                field="temperature",
            )

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel: a window at a time."""
        async with aclosing(self.heard(windows, request, ask)) as each:
            async for one in each:
                yield one.text

    async def _heard(self, window: Window, request: SpeechRequest, ask: Ask) -> Heard:
        assert isinstance(window.sound, ProcessedMedia), "a model of frames hears inputs"
        medium = await asyncio.to_thread(prepared_window, window.sound)
        assert self._media.audio_token is not None
        mark = [self._media.audio_token]
        ids, media = expanded(mark, [medium], self._media, self._encode, field="file")
        events = ask(ids, NO_TOKENS, PooledSound(media=media, pooling=EVERY_FRAME))
        logits = (await fold_pooled(events, num_prompt=len(ids))).values
        labels = emitted(logits) if self._media.emits else collapsed(logits, self._blank)
        text = self._decoded([one.id for one in labels])
        text = text if window.start == 0.0 or not text else f" {text.lstrip()}"
        return Heard(
            window=window,
            text=text,
            segments=self._segments(window, labels, text),
            temperature=0.0,
            mean_logprob=sum(one.score for one in labels) / max(1, len(labels)),
            num_prompt=len(ids),
            num_output=len(labels),
            words=self._words(window, labels),
        )

    def _segments(self, window: Window, labels: list[Label], text: str) -> list[SpeechSegment]:
        if not text.strip():
            return []
        return [
            SpeechSegment(
                start=self._at(window, labels[0].first),
                end=self._at(window, labels[-1].end),
                text=text,
                tokens=[one.id for one in labels],
            )
        ]

    def _words(self, window: Window, labels: list[Label]) -> list[TimedWord]:
        """Labels between spaces."""
        words: list[tuple[str, int, int]] = []
        shown, apart = "", True
        for count, label in enumerate(labels, 1):
            text = self._decoded([one.id for one in labels[:count]])
            if text.endswith("\ufffd") and count < len(labels):
                continue  # half a character
            piece, shown = text[len(shown) :], text
            if not piece:
                continue  # a control token
            apart = apart or piece.startswith(" ")
            if not (bare := piece.strip()):
                apart = True
            elif apart:
                words.append((bare, label.first, label.end))
                apart = piece.endswith(" ")
            else:
                word, first, _ = words[-1]
                words[-1] = word + bare, first, label.end
                apart = piece.endswith(" ")
        return [
            TimedWord(word=word, start=self._at(window, first), end=self._at(window, end))
            for word, first, end in words
        ]

    def _at(self, window: Window, frame: int) -> float:
        return min(window.start + frame * self._frame_s, window.end)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def collapsed(logits_FL: Float32, blank: int) -> list[Label]:
    """What the likeliest labels of frames say."""
    best_F = logits_FL.argmax(axis=1)
    score_F = np.log(probabilities(logits_FL, "softmax").max(axis=1))
    starts = np.flatnonzero(np.diff(best_F, prepend=-1))
    ends = [*starts[1:].tolist(), len(best_F)]
    runs = zip(best_F[starts].tolist(), starts.tolist(), ends, strict=True)
    return [
        Label(label, first, end, float(score_F[first:end].max()))
        for label, first, end in runs
        if label != blank
    ]


def emitted(rows_FN: Float32) -> list[Label]:
    """What frames emit, in their order: of each a token and one, how many frames it lasts, its
    log-probability."""
    labels = []
    for frame, row in enumerate(rows_FN.reshape(len(rows_FN), -1, NUMBERS)):
        for token, frames, score in row[row[:, 0] > 0].tolist():
            labels.append(Label(int(token) - 1, frame, frame + max(1, int(frames)), score))
    return labels
