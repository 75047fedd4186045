"""POST /v1/audio/transcriptions and /v1/audio/translations: a file of speech to text, whole, as
subtitles, with segments, or as it is heard."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.diarized_transcription import check_speakers
from headrace.front.client.transcription import Ask, Heard, SpeechModel
from headrace.front.media.log_mel import RATE
from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.conversation.own_names import base_of
from headrace.front.server.conversation.pipeline import streamed
from headrace.front.server.conversation.speech import asking, duration, scores_of
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.forms import read_form
from headrace.front.server.http.sse import DONE, Chunks, until_gone
from headrace.front.server.openai.audio_form import (
    DIARIZED,
    AskedTranscript,
    asked_of,
    check_model,
)
from headrace.front.text.alignment import TimedWord
from headrace.front.text.transcript import JoinedText, SpeechSegment, subrip, webvtt

Samples = npt.NDArray[np.int16]


async def post_transcription(context: RequestContext, request: Request) -> Response:
    """POST /v1/audio/transcriptions: what is said, in its own language."""
    return await _post(context, request, translates=False)


async def post_translation(context: RequestContext, request: Request) -> Response:
    """POST /v1/audio/translations: what is said, in English."""
    return await _post(context, request, translates=True)


async def _post(context: RequestContext, request: Request, *, translates: bool) -> Response:
    services = context.services
    if services.models is None:
        _check_hears(services)
    form = await read_form(request, services.server, context.make_room)
    asked = asked_of(form, translates=translates)
    names = form.fields.get("model", [])
    model = await base_of(context, names[-1] if names else None)
    choice = context.choose_model({"model": model}, runs=True)
    await until_gone(request.receive, choice, abandon=services.abandon)
    services = context.services
    speech = _check_hears(services)
    services.model_name(model)
    speech.check(asked.speech)
    check_model(asked, speech)
    if asked.format == DIARIZED:
        check_speakers(speech.tells_speakers)
    response: Response = await until_gone(
        request.receive, _answer(context, speech, asked), abandon=services.abandon
    )
    return response


def _check_hears(services: Services) -> SpeechModel:
    if services.speech is None:
        raise InvalidRequest("the model does not hear: this route needs a speech model")
    return services.speech


async def _answer(context: RequestContext, speech: SpeechModel, asked: AskedTranscript) -> Response:
    context.hold_place()
    samples = await speech.read(asked.file)
    context.body_is_read()
    ask = asking(context, completion_id("audio"))
    if asked.stream:
        if asked.chunks:
            return await streamed(context, _chunks(context, speech, asked, samples, ask))
        return await streamed(context, _events(speech, asked, samples, ask))
    windows, verbose = speech.windows(samples), asked.format == "verbose_json"
    async with aclosing(speech.heard(windows, asked.speech, ask, scores_silence=verbose)) as each:
        heard = [one async for one in each]
    return _written(asked, heard, heard[0].language, len(samples) / RATE)


async def _events(
    speech: SpeechModel, asked: AskedTranscript, samples: Samples, ask: Ask
) -> Chunks:
    """The text as it is heard: OpenAI's transcript events."""
    said = JoinedText()
    async with aclosing(speech.deltas(speech.windows(samples), asked.speech, ask)) as parts:
        async for part in parts:
            if text := said.add(part):
                yield _event({"type": "transcript.text.delta", "delta": text})
    usage = duration(len(samples) / RATE)
    yield _event({"type": "transcript.text.done", "text": said.text, "usage": usage})


async def _chunks(
    context: RequestContext,
    speech: SpeechModel,
    asked: AskedTranscript,
    samples: Samples,
    ask: Ask,
) -> Chunks:
    """The text as it is heard, in the objects of vLLM's streams."""
    head = {
        "id": completion_id("trsc"),
        "object": "transcription.chunk",
        "created": int(time.time()),
        "model": context.services.model_name(None),
    }
    said = JoinedText()
    async with aclosing(speech.deltas(speech.windows(samples), asked.speech, ask)) as parts:
        async for part in parts:
            if text := said.add(part):
                yield _event(head | {"choices": [_choice(text, None)]})
    usage = duration(len(samples) / RATE)
    yield _event(head | {"choices": [_choice("", "stop")], "usage": usage})
    yield DONE


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "finish_reason": reason}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _written(asked: AskedTranscript, heard: list[Heard], language: str, seconds: float) -> Response:
    text = "".join(one.text for one in heard).strip()
    segments = [segment for one in heard for segment in one.segments]
    if asked.format == "text":
        return PlainTextResponse(text + "\n")
    if asked.format == "srt":
        return PlainTextResponse(subrip(segments))
    if asked.format == "vtt":
        return PlainTextResponse(webvtt(segments), media_type="text/vtt")
    document: dict[str, Any] = {"text": text, "usage": duration(seconds)}
    if asked.logprobs:
        document["logprobs"] = [one for each in heard for one in scores_of(each)]
    if asked.speech.languages:
        document["languages"] = [{"code": language}]
    if asked.format == DIARIZED:
        document |= {"task": "transcribe", "duration": round(seconds, 3)}
        document["segments"] = [_diarized(i, one) for i, one in enumerate(segments)]
    if asked.format == "verbose_json":
        document |= {
            "task": "translate" if asked.speech.translates else "transcribe",
            "language": language,
            "duration": round(seconds, 3),
        }
        if asked.segments:
            document["segments"] = _documents(heard)
        if asked.speech.words:
            document["words"] = [_word(one) for each in heard for one in each.words]
    return Response(orjson.dumps(document), media_type="application/json")


def _documents(heard: list[Heard]) -> list[dict[str, Any]]:
    parts = [(one, segment) for one in heard for segment in one.segments]
    return [_document(i, one, segment) for i, (one, segment) in enumerate(parts)]


def _diarized(number: int, segment: SpeechSegment) -> dict[str, Any]:
    return {
        "type": "transcript.text.segment",
        "id": f"seg_{number}",
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "speaker": segment.speaker or "A",
        "text": segment.text,
    }


def _word(one: TimedWord) -> dict[str, Any]:
    return {"word": one.word.strip(), "start": round(one.start, 3), "end": round(one.end, 3)}


def _document(number: int, heard: Heard, segment: SpeechSegment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": round(heard.window.start * 100),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": heard.temperature,
        "avg_logprob": heard.mean_logprob,
        "compression_ratio": heard.compression,
        "no_speech_prob": heard.no_speech,
    }
