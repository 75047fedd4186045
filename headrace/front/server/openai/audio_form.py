"""The forms of /v1/audio/transcriptions and /v1/audio/translations: OpenAI's fields, and those of
vLLM's clients that say how text is sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.speech_request import SpeechRequest, with_keywords
from headrace.front.client.transcription import SpeechModel
from headrace.front.server.conversation.speech import check_scores
from headrace.front.server.http.forms import Form

DIARIZED = "diarized_json"
FORMATS = ("json", "text", "srt", "vtt", "verbose_json", DIARIZED)
TIMED = ("srt", "vtt", "verbose_json", DIARIZED)
LISTS = {
    "timestamp_granularities": ("segment", "word"),
    "include": ("logprobs",),
    "languages": (),
    "keywords": (),
}
"""Fields with several values, and what these may be (empty: anything)."""
SAMPLED: dict[str, Callable[[str], int | float]] = {
    "seed": int,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "max_completion_tokens": int,
}
STRATEGIES = ("auto", "server_vad")
STRATEGY = tuple(
    f"chunking_strategy[{name}]"
    for name in ("type", "threshold", "prefix_padding_ms", "silence_duration_ms")
)
"""As OpenAI's client writes an object; sound is cut at quiet places whatever they say."""
FLAGS = ("stream", "vllm_stream", "stream_include_usage", "stream_continuous_usage_stats")
FIELDS = {
    "model",
    "language",
    "to_language",
    "prompt",
    "hotwords",
    "response_format",
    "temperature",
    "chunking_strategy",
    *STRATEGY,
    *FLAGS,
    *LISTS,
    *SAMPLED,
}
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class AskedTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """The form, checked. `segments`: whether verbose_json tells them; `logprobs`: whether json
    tells those of tokens; `chunks`: whether a stream has the form of vLLM's."""

    file: bytes
    speech: SpeechRequest
    format: str
    stream: bool
    segments: bool
    logprobs: bool
    chunks: bool


def asked_of(form: Form, *, translates: bool) -> AskedTranscript:
    """The fields of a form; InvalidRequest names the one that is wrong."""
    unknown = sorted(form.fields.keys() - FIELDS)
    if unknown:
        raise InvalidRequest(f"{unknown[0][:50]}: is not known here", field=unknown[0][:50])
    if "file" not in form.files:
        raise InvalidRequest("file: this field is required", field="file")
    single = {name: values[-1] for name, values in form.fields.items()}
    shape = _one_of("response_format", single.get("response_format", "json"), FORMATS)
    lists = {name: _listed(form, name) for name in LISTS}
    flags = {name: _flag(single, name) for name in FLAGS}
    for name in {"chunking_strategy", STRATEGY[0]} & single.keys():
        _one_of(name, single[name], STRATEGIES)
    _check_together(lists, flags, shape)
    granularities = lists["timestamp_granularities"]
    return AskedTranscript(
        file=form.files["file"][1],
        speech=_speech(single, lists, translates=translates, times=shape in TIMED),
        format=shape,
        stream=flags["stream"] or flags["vllm_stream"],
        segments=not granularities or "segment" in granularities,
        logprobs="logprobs" in lists["include"],
        chunks=flags["vllm_stream"],
    )


def check_model(asked: AskedTranscript, speech: SpeechModel) -> None:
    """InvalidRequest where the model does not tell what is asked for."""
    if asked.logprobs:
        check_scores(speech, "include")
    if asked.speech.languages and not speech.tells_scores:
        raise InvalidRequest(
            "languages: this model does not choose among languages; language names the one",
            field="languages",
        )


def _speech(
    single: dict[str, str], lists: dict[str, list[str]], *, translates: bool, times: bool
) -> SpeechRequest:
    if (target := single.get("to_language")) and (not translates or target.lower() != "en"):
        raise InvalidRequest(
            f"to_language: {target[:30]!r} given; translations are into English (en)",
            field="to_language",
        )
    words = [*lists["keywords"], *filter(None, [single.get("hotwords", "").strip()])]
    languages = lists["languages"]
    language = single.get("language") or (languages[0] if len(languages) == 1 else None)
    return SpeechRequest(
        language=language,
        languages=() if language else tuple(languages),
        translates=translates,
        prompt=with_keywords(single.get("prompt", ""), words),
        temperature=_temperature(single.get("temperature", "0")),
        times=times,
        words="word" in lists["timestamp_granularities"],
        sampling=_sampling(single),
    )


def _sampling(single: dict[str, str]) -> SamplingParams:
    stated: dict[str, Any] = {}
    for name, kind in SAMPLED.items():
        if name in single:
            try:
                value = kind(single[name])
            except ValueError:
                raise InvalidRequest(
                    f"{name}: {single[name][:30]!r} given; a number is wanted", field=name
                ) from None
            stated["max_tokens" if name == "max_completion_tokens" else name] = value
    if stated.get("max_tokens", 1) < 1:
        raise InvalidRequest(
            f"max_completion_tokens: {stated['max_tokens']} given; at least 1",
            field="max_completion_tokens",
        )
    return SamplingParams(**stated)


def _listed(form: Form, field: str) -> list[str]:
    values = form.fields.get(field, [])
    if allowed := LISTS[field]:
        for one in values:
            _one_of(field, one, allowed)
    return values


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidRequest(
            f"{field}: {value[:30]!r} given; allowed: {', '.join(allowed)}", field=field
        )
    return value


def _flag(single: dict[str, str], field: str) -> bool:
    value = single.get(field, "false").lower()
    if value not in _TRUTHS:
        raise InvalidRequest(f"{field}: {value[:30]!r} given; true or false", field=field)
    return _TRUTHS[value]


def _check_together(lists: dict[str, list[str]], flags: dict[str, bool], shape: str) -> None:
    """What does not go together."""
    streams = flags["stream"] or flags["vllm_stream"]
    if lists["timestamp_granularities"] and shape != "verbose_json":
        field = "timestamp_granularities"
        raise InvalidRequest(f"{field}: needs response_format verbose_json", field=field)
    if lists["include"] and (shape != "json" or streams):
        raise InvalidRequest(
            "include: logprobs are told with response_format json, not streamed", field="include"
        )
    if streams and shape in TIMED:
        raise InvalidRequest(
            f"stream: does not go with response_format {shape}; json and text are streamed",
            field="stream",
        )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise InvalidRequest(
            f"temperature: {text[:30]!r} given; a number from 0 to 1", field="temperature"
        )
    return value
