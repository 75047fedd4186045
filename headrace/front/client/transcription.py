"""Speech to text: a file's samples, windows of them as spectrograms, and what the decoder is asked
about each.

Windows are heard apart from each other, in the order of their times. A window's answer is taken if
it is likely and does not repeat itself; else it is made again with more randomness (Radford et al.
2022, section 4.5).
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import exp
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.config.media import ProcessorSettings
from headrace.base.config.resolved import TextSpec
from headrace.base.errors import EngineError, InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import (
    AttentionWeights,
    Delta,
    Events,
    ScoredToken,
    fold_written,
)
from headrace.front.client.speech_request import SpeechRequest
from headrace.front.media.job import DecodingLimits, MediaJob
from headrace.front.media.jobs import MediaProcesses, default_size
from headrace.front.media.log_mel import HOP, RATE, LogMel
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.quiet import first_cut, windows
from headrace.front.media.sound import samples_of
from headrace.front.text.alignment import POSITION_S, TimedWord, alignment, path, timed_words
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import SpeechSegment, SpeechTokens, segments_of

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LEAST_LOGPROB = -1.0
MOST_COMPRESSION = 2.4
NO_SPEECH = 0.6
SUPPRESSED = -100.0
TIME = re.compile(r"<\|\d+\.\d\d\|>")
"""A time token, which tokenizers do not call special: a model may say one unasked."""
SEED = 0
"""Of what is tried with randomness: the same sound has the same text."""

Samples = npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class PooledSound:
    """Inputs of a prompt of which the labels of each token are asked for, and no text."""

    media: tuple[MediaInput, ...]
    pooling: RowPooling


Sound = bytes | tuple[MediaInput, ...] | PooledSound
"""What the model hears of a window: an encoder's spectrogram, or inputs of a prompt."""
Ask = Callable[[list[int], SamplingParams, Sound], Events]
"""Runs the decoder behind these tokens, over a spectrogram or with inputs among them."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a file, in seconds, and what the model hears of it. `complete`: else more of it
    comes, and the next window holds all of it."""

    start: float
    end: float
    sound: bytes | ProcessedMedia
    complete: bool = True


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a window says; `num_prompt` and `num_output` tokens of the decoder."""

    window: Window
    text: str
    segments: list[SpeechSegment]
    temperature: float
    mean_logprob: float
    num_prompt: int
    num_output: int
    scores: list[ScoredToken] = field(default_factory=list)
    no_speech: float = 0.0
    language: str = ""
    words: list[TimedWord] = field(default_factory=list)

    @property
    def compression(self) -> float:
        """The text's bytes for each of it compressed: many where it repeats itself."""
        data = self.text.encode()
        return len(data) / max(1, len(zlib.compress(data)))


class SpeechModel(Protocol):
    """What routes ask of a model that hears. tells_speakers: its segments say who speaks;
    tells_scores: how likely tokens of its text and languages are."""

    tells_speakers: bool
    tells_scores: bool

    async def read(self, data: bytes) -> Samples:
        """The samples of a file; InvalidRequest names what is wrong with it."""
        ...

    def windows(self, samples: Samples) -> AsyncGenerator[Window, None]:
        """The file's windows, each made when it is asked for."""
        ...

    def windows_as_they_come(self, chunks: AsyncIterator[Samples]) -> AsyncGenerator[Window, None]:
        """The same windows of samples that arrive in chunks, each as soon as its end is known."""
        ...

    def check(self, request: SpeechRequest) -> None:
        """InvalidRequest where the model cannot do what is asked."""
        ...

    def heard(
        self,
        windows: AsyncGenerator[Window, None],
        request: SpeechRequest,
        ask: Ask,
        *,
        scores_silence: bool = False,
    ) -> AsyncGenerator[Heard, None]:
        """What each window says. `scores_silence`: how likely nothing is said is wanted too."""
        ...

    def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """The text of all windows as it is decoded, without a second try."""
        ...


class SoundReader:
    """Files, and windows of at most `most` samples."""

    tells_speakers = False
    tells_scores = False

    def __init__(self, most: int) -> None:
        self._most = most
        self._processes = MediaProcesses(DecodingLimits(), size=default_size())

    async def read(self, data: bytes) -> Samples:
        """The samples of a file; InvalidRequest names what is wrong with it."""
        job = MediaJob(
            kind="audio",
            family="",
            settings=ProcessorSettings(),
            limits=self._processes.limits,
            sizes=(len(data),),
        )
        try:
            (medium,) = await asyncio.to_thread(self._processes.run, job, [data])
        except InvalidRequest as error:
            raise InvalidRequest(f"file: {error.message}", field="file") from None
        return samples_of(medium)

    async def windows(self, samples: Samples) -> AsyncGenerator[Window, None]:
        """The file's windows, each made when it is asked for."""
        for begin, end in windows(samples, self._most):
            yield await self._window(samples[begin:end], begin)

    async def windows_as_they_come(
        self, chunks: AsyncIterator[Samples]
    ) -> AsyncGenerator[Window, None]:
        """The same windows of samples that arrive in chunks, each as soon as its end is known."""
        begin, left = 0, np.zeros(0, np.int16)
        async for chunk in chunks:
            left = np.concatenate([left, chunk])
            while (cut := first_cut(left, self._most)) is not None:
                yield await self._window(left[:cut], begin)
                begin, left = begin + cut, left[cut:]
        yield await self._window(left, begin)

    async def _window(self, samples: Samples, begin: int) -> Window:
        sound = await asyncio.to_thread(self._sound, samples)
        return Window(start=begin / RATE, end=(begin + len(samples)) / RATE, sound=sound)

    def _sound(self, samples: Samples) -> bytes | ProcessedMedia:
        """What the model hears of a window."""
        raise NotImplementedError


class Transcriber(SoundReader):
    """For a speech model with an encoder (Whisper)."""

    tells_scores = True

    def __init__(self, text: TextSpec, tokenizer: Tokenizer) -> None:
        bands, frames = text.spectrogram
        super().__init__(frames * HOP)
        self._mel = LogMel(bands, frames)
        self._tokenizer = tokenizer
        self._tokens = SpeechTokens.of(tokenizer)
        self._context = text.max_model_len
        self._bias = dict.fromkeys(text.suppressed_ids, SUPPRESSED)
        self._alignment_heads = text.alignment_heads

    def _sound(self, samples: Samples) -> bytes:
        return self._mel.features(samples).tobytes()

    async def heard(
        self,
        windows: AsyncGenerator[Window, None],
        request: SpeechRequest,
        ask: Ask,
        *,
        scores_silence: bool = False,
    ) -> AsyncGenerator[Heard, None]:
        """What each window says. The language is that of the first. `scores_silence`: how likely
        nothing is said is found out for each, and what is said in silence is left out."""
        language = request.language
        async with aclosing(windows):
            async for window in windows:
                no_speech = 0.0
                if language is None or scores_silence:
                    code, no_speech = await self.look(window, ask, request.languages)
                    language = language or code
                one = await self.hear(window, request, language, ask)
                if no_speech > NO_SPEECH and one.mean_logprob < LEAST_LOGPROB:
                    one = replace(one, text="", segments=[])
                one = replace(one, no_speech=no_speech, language=language)
                if request.words and one.text.strip():
                    one = replace(one, words=await self.words(one, request, ask))
                yield one

    def check(self, request: SpeechRequest) -> None:
        """InvalidRequest where the model cannot do what is asked."""
        for code in (request.language, *request.languages):
            if code is not None:
                self._tokens.language(code)
        if request.translates and (self._tokens.translate is None or not self._tokens.languages):
            raise InvalidRequest("this model knows English alone, and translates nothing")

    async def look(
        self, window: Window, ask: Ask, languages: Sequence[str] = ()
    ) -> tuple[str, float]:
        """The language a window is spoken in (of these, if there are any), and how likely nothing
        is said: one token behind the start token."""
        tokens = self._tokens
        allowed = [tokens.language(code) for code in languages] or tokens.languages.values()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=0,
            allowed_token_ids=tuple(one for one in allowed if one is not None) or None,
            logprob_token_ids=() if tokens.nothing is None else (tokens.nothing,),
        )
        language, no_speech = "en", 0.0
        async with aclosing(ask([tokens.start], params, _spectrogram(window))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    codes = {token: code for code, token in tokens.languages.items()}
                    for token in event.token_ids:
                        language = codes.get(token, language)
                    for score in event.scores or []:
                        no_speech = sum(exp(one.logprob) for one in score.named)
        return language, no_speech

    async def deltas(
        self, windows: AsyncGenerator[Window, None], request: SpeechRequest, ask: Ask
    ) -> AsyncGenerator[str, None]:
        """See SpeechModel."""
        language = request.language
        async with aclosing(windows):
            async for window in windows:
                if language is None:
                    language, _ = await self.look(window, ask, request.languages)
                begins = self.begins_with(request, language)
                params = self._params(request, begins, request.temperature)
                async with aclosing(ask(begins, params, _spectrogram(window))) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            yield TIME.sub("", event.text)

    def begins_with(self, request: SpeechRequest, language: str) -> list[int]:
        """What the decoder begins with."""
        tokens = self._tokens
        begins = [tokens.start]
        if tokens.languages:
            named, task = tokens.language(language), tokens.transcribe
            if request.translates:
                task = tokens.translate
            begins += [one for one in (named, task) if one is not None]
        if not request.times:
            begins.append(tokens.no_times)
        if request.prompt.strip() and tokens.previous is not None:
            before = self._tokenizer.encode_plain(" " + request.prompt.strip())
            begins = [tokens.previous, *before[-(self._context // 2 - 1) :], *begins]
        return begins

    def _params(
        self, request: SpeechRequest, begins: Sequence[int], temperature: float
    ) -> SamplingParams:
        params = request.params(temperature, room=self._context - len(begins))
        seed = SEED if temperature and params.seed is None else params.seed
        return msgspec.structs.replace(params, logit_bias=self._bias, seed=seed)

    async def hear(self, window: Window, request: SpeechRequest, language: str, ask: Ask) -> Heard:
        """A window's text, at the first temperature that gives a good one, or else the last."""
        heard: Heard | None = None
        begins = self.begins_with(request, language)
        for temperature in TEMPERATURES:
            if temperature < request.temperature and temperature != TEMPERATURES[-1]:
                continue
            tried = max(temperature, request.temperature)
            params = self._params(request, begins, tried)
            heard = await self._heard(window, begins, params, ask)
            good = heard.mean_logprob > LEAST_LOGPROB and heard.compression < MOST_COMPRESSION
            if good or request.temperature:
                break
        assert heard is not None
        return heard

    async def words(self, heard: Heard, request: SpeechRequest, ask: Ask) -> list[TimedWord]:
        """When each word of a window is said: its text once more, in one step, whose attention is
        told."""
        ids = [token for segment in heard.segments for token in segment.tokens]
        plain = msgspec.structs.replace(request, times=False, prompt="")
        begins = self.begins_with(plain, heard.language)
        heads = self._alignment_heads
        params = SamplingParams(
            max_tokens=0,
            temperature=0.0,
            capture_layers=tuple(2 * layer + 1 for layer, _ in heads),  # behind each self-attention
            capture_heads=tuple(head for _, head in heads),
        )
        layers: dict[int, npt.NDArray[np.float32]] = {}
        prompt = [*begins, *ids, self._tokens.end]
        async with aclosing(ask(prompt, params, _spectrogram(heard.window))) as events:
            async for event in events:
                if isinstance(event, AttentionWeights):
                    layers = event.layers
        if not layers:
            raise EngineError("the engine told no attention weights")
        window = heard.window
        positions = max(1, round((window.end - window.start) / POSITION_S))
        weights = np.concatenate([layers[layer] for layer in sorted(layers)], axis=1)
        scores = alignment(weights, num_positions=min(positions, weights.shape[2]))
        # The last token that the decoder begins with, and each of the text, look at what is next.
        places = path(scores[len(begins) - 1 : -1])
        return timed_words(
            ids,
            places,
            self._decoded,
            language=heard.language,
            begin_s=window.start,
            end_s=window.end,
        )

    async def _heard(
        self, window: Window, begins: list[int], params: SamplingParams, ask: Ask
    ) -> Heard:
        written = await fold_written(ask(begins, params, _spectrogram(window)))
        segments = segments_of(
            written.token_ids,
            self._decoded,
            first_time=self._tokens.first_time,
            begin_s=window.start,
            end_s=window.end,
        )
        return Heard(
            window=window,
            text="".join(segment.text for segment in segments),
            segments=segments,
            temperature=params.temperature,
            mean_logprob=written.mean_logprob,
            num_prompt=len(begins),
            num_output=len(written.token_ids),
            scores=written.scores,
        )

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _spectrogram(window: Window) -> bytes:
    assert isinstance(window.sound, bytes), "an encoder reads spectrograms"
    return window.sound
