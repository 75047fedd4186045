"""POST /infill: what stands between two texts, as clients of llama.cpp's server ask for it.

The prompt is made of the control tokens that the vocabulary has for insertion (front/text/fim.py);
a model without them refuses by name. Names of fields and of the answer are that server's."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta
from starlette.responses import Response

from headrace.front.client.events import Delta, Ended, Event, Events, Started
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import events_as_sent, generate, streamed
from headrace.front.server.conversation.request import (
    CompletionRequest,
    completion_params,
    parse,
)
from headrace.front.server.conversation.resolved import SentNames, as_sent, run_options
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.limits import Name, typed
from headrace.front.server.http.sse import Chunks
from headrace.front.text.fim import infill
from headrace.front.text.threads import TEXT_THREADS

Json = dict[str, Any]
Text = Annotated[str, Meta(max_length=2**22)]
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "stream", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "xtc_probability", "xtc_threshold"),
    *("top_n_sigma", "dynatemp_range", "dynatemp_exponent", "ignore_eos"),
)
_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "prompt": "input_prefix",
}


class ExtraText(msgspec.Struct, frozen=True, kw_only=True):
    """A text of another file, which stands in front."""

    text: Text
    filename: Annotated[str, Meta(max_length=1024)] = ""


class InfillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /infill. `prompt`: how what is asked for begins. `n_predict` -1: as much as there is
    room for. Sampling fields have the bounds of every completion."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[ExtraText], Meta(max_length=256)] | None = None
    prompt: Text = ""
    model: Name | None = None
    n_predict: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    repeat_penalty: float | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    ignore_eos: bool | None = None


async def post_infill(context: RequestContext, document: Any) -> Response:
    """POST /infill."""
    request = typed(document, InfillRequest)
    services = context.services
    model = services.model_name(request.model)
    completion = _completion(request, most=services.context_tokens)
    with as_sent(SentNames(names=_NAMES)):
        params = completion_params(
            completion,
            defaults=services.text.generation_defaults,
            max_n=services.server.max_n,
            max_logprobs=services.server.max_logprobs,
        )
    ids = await _prompt(context, request)
    context.hold_place()
    events = generate(
        context,
        ids,
        params,
        run_options(completion, "" if model in services.text.model_names else model),
        label=completion_id("cmpl"),
        prompt_field="input_prefix",
    )
    events = events_as_sent(events, SentNames(names=_NAMES))
    stream = InfillStream(model=model)
    if request.stream:
        return await streamed(context, to_chunks(events, stream))
    return json_response(await to_answer(events, stream))


def _completion(request: InfillRequest, *, most: int) -> CompletionRequest:
    fields: Json = {name: getattr(request, name) for name in _SAME}
    fields["repetition_penalty"] = request.repeat_penalty
    fields["max_tokens"] = most if request.n_predict < 0 else min(request.n_predict, most)
    if request.seed is not None and request.seed < 0:
        fields["seed"] = None
    known = {name: value for name, value in fields.items() if value is not None}
    with as_sent(SentNames(names=_NAMES)):
        return parse({"prompt": "", **known}, CompletionRequest)


async def _prompt(context: RequestContext, request: InfillRequest) -> list[int]:
    services = context.services
    tokenizer, most = services.tokenizer, services.text.max_model_len
    extra = [(one.filename, one.text) for one in request.input_extra or []]
    texts = [request.input_prefix, request.input_suffix, request.prompt]
    for text in (*texts, *(text for _, text in extra)):
        tokenizer.check_length(text, most)
    size = sum(map(len, texts)) + sum(len(text) for _, text in extra)
    return await TEXT_THREADS.run(
        size,
        lambda: infill(
            tokenizer,
            prefix=request.input_prefix,
            suffix=request.input_suffix,
            begun=request.prompt,
            extra=extra,
        ),
    )


@dataclass
class InfillStream:
    """Turns events into documents; `answer` is the full answer once the end is there."""

    model: str
    answer: Json = field(init=False, default_factory=dict)
    _texts: list[str] = field(init=False, default_factory=list)
    _tokens: list[int] = field(init=False, default_factory=list)
    _num_prompt: int = field(init=False, default=0)
    _begun: float = field(init=False, default_factory=time.monotonic)

    def take(self, event: Event) -> list[Json]:
        """The documents of a stream for one event."""
        match event:
            case Started():
                self._num_prompt = event.num_prompt
            case Delta():
                self._texts.append(event.text)
                self._tokens += event.token_ids
                part = {"content": event.text, "tokens": event.token_ids, "stop": False, "index": 0}
                return [part] if event.text else []
            case Ended():
                return [self._end(event)]
        return []

    def _end(self, ended: Ended) -> Json:
        word = ended.stop if isinstance(ended.stop, str) else ""
        limited = ended.reason == "length"
        last: Json = {
            "content": "",
            "tokens": [],
            "index": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": ended.num_output,
            "tokens_evaluated": self._num_prompt,
            "tokens_cached": min(ended.num_cached, self._num_prompt),
            "truncated": False,
            "stop_type": "limit" if limited else "word" if word else "eos",
            "stopping_word": word,
        }
        self.answer = {**last, "content": "".join(self._texts), "tokens": self._tokens}
        return last


async def to_chunks(events: Events, stream: InfillStream) -> Chunks:
    """The stream; its last document says stop."""
    async with aclosing(events):
        async for event in events:
            for document in stream.take(event):
                yield b"data: " + orjson.dumps(document) + b"\n\n"


async def to_answer(events: Events, stream: InfillStream) -> Json:
    """The full answer."""
    async with aclosing(events):
        async for event in events:
            stream.take(event)
    return stream.answer
