"""A conversation on its way to the engine: the one path of every dialect.

`ChatRequest` is the house's conversation: messages, tools, structure, sampling. A dialect is two pure functions around
it: its own request to a `Translated` one, and events to its own stream; its full answer is the fold of that stream.
`begin` does the rest once for all of them: parameters, the chat template, a parser per answer, the generation. What is
wrong with a translated request is told in the words of the request as it was sent (`as_sent`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import Forbidden, RequestError
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Events, Generation
from headrace.front.server.coalesce import Pace, pace_of, paced
from headrace.front.server.exchange import Exchange
from headrace.front.server.failures import OPENAI, Shape
from headrace.front.server.measure import measured
from headrace.front.server.openai import chat
from headrace.front.server.openai.sampling import truncated
from headrace.front.server.openai.schema import ChatRequest, Common, StreamOptions, parse
from headrace.front.server.parsed import ParsedAnswer, parsed, without_reasoning
from headrace.front.server.sse import Chunks, EventStream, started
from headrace.front.server.structured import FREE, Structure, is_plain, narrowed, structure_of
from headrace.front.text.chat import ChatTemplate

_MESSAGE = re.compile(r"messages\[(\d+)\][^:]*")


@dataclass(frozen=True, kw_only=True)
class Translated:
    """A dialect's request as fields of `ChatRequest`. `places`: where message i stood in the request as sent; `names`:
    what other fields are called there. `stop`: stop strings under the dialect's own bound."""

    document: dict[str, Any]
    places: Sequence[str]
    names: Mapping[str, str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()

    def typed(self) -> ChatRequest:
        """The conversation, checked as every conversation is."""
        with as_sent(self):
            request = parse(self.document, ChatRequest)
        return msgspec.structs.replace(request, stop=list(self.stop)) if self.stop else request


def _inside(place: str, field: str) -> str:
    """Which part of the message at `place` is meant. What is no list of parts was made here; outputs are such lists."""
    _, found, part = field.partition(".content[")
    if not found:
        return place
    return f"{place}[{part}" if place.endswith(".output") else f"{place}{found}{part}"


@contextmanager
def as_sent(translated: Translated) -> Iterator[None]:
    """Errors about fields of the translation become errors about the fields they came from."""
    try:
        yield
    except RequestError as error:
        given = error.field or ""
        found = _MESSAGE.match(given)
        if found is not None and int(found[1]) < len(translated.places):
            sent = _inside(translated.places[int(found[1])], found[0])
        else:
            head = re.split(r"[.\[]", given, maxsplit=1)[0]
            sent = translated.names.get(given) or translated.names.get(head, given)
        message = error.message
        if given and message.startswith(given + ":"):
            message = sent + message.removeprefix(given)
        raise type(error)(message, field=sent or None) from None


async def begin(
    exchange: Exchange, request: ChatRequest, *, label: str
) -> tuple[list[int], Events]:
    """The prompt's ids and the events of its continuation, which runs once they are read."""
    services = exchange.services
    plain = is_plain(request)
    request = request if plain else narrowed(request)
    params = chat.to_params(
        request, defaults=services.text.generation_defaults, max_n=services.server.max_n
    )
    exchange.hold_place()
    prompt_ids = truncated(
        await render(exchange, request), request, max_model_len=services.text.max_model_len
    )
    tail = services.answers.prompt_tail(services.tokenizer, prompt_ids)
    events = generate(
        *(exchange, request, prompt_ids, params),
        label=label,
        answers=parsers_after(exchange, request, tail, params),
        structure=FREE if plain else structure_of(request, services.answers, prompt_tail=tail),
    )
    return prompt_ids, events


async def begin_translated(
    exchange: Exchange, translated: Translated, request: ChatRequest, *, label: str
) -> Events:
    """`begin` for a translated request."""
    with as_sent(translated):
        _, events = await begin(exchange, request, label=label)
    return told_as_sent(events, translated)


async def told_as_sent(events: Events, translated: Translated) -> Events:
    """The events; what goes wrong among them is told in the words of the request as it was sent."""
    async with aclosing(events):
        with as_sent(translated):
            async for event in events:
                yield event


async def render(exchange: Exchange, request: ChatRequest) -> list[int]:
    """The messages as token ids, through the model's chat template."""
    services = exchange.services
    template = services.template
    if request.chat_template is not None:
        if not services.server.trust_request_chat_template:
            raise Forbidden(
                "chat_template: this server does not take templates from requests",
                field="chat_template",
            )
        template = ChatTemplate(
            request.chat_template,
            services.tokenizer,
            pool=services.guest_templates,
            max_tokens=services.text.max_model_len,
        )
    tail = bool(request.continue_final_message)
    opens = not tail if request.add_generation_prompt is None else request.add_generation_prompt
    kwargs = dict(request.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity", "documents"):
        if getattr(request, name) is not None:
            kwargs.setdefault(name, getattr(request, name))
    if request.reasoning_effort is not None:  # templates that know only on and off
        kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    ids = await template.render_async(
        request.messages,
        tools=None if request.tool_choice == "none" else request.tools,
        add_generation_prompt=opens,
        continue_final_message=tail,
        kwargs=kwargs,
    )
    return services.tokenizer.with_special(ids) if request.add_special_tokens else ids


def parsers(
    exchange: Exchange, request: ChatRequest, prompt_ids: list[int], params: SamplingParams
) -> list[ParsedAnswer] | None:
    """A parser per choice for what follows this prompt."""
    services = exchange.services
    tail = services.answers.prompt_tail(services.tokenizer, prompt_ids)
    return parsers_after(exchange, request, tail, params)


def parsers_after(
    exchange: Exchange, request: ChatRequest, tail: str, params: SamplingParams
) -> list[ParsedAnswer] | None:
    """A parser per choice; None where nothing is to be parsed."""
    answers, tokenizer = exchange.services.answers, exchange.services.tokenizer
    pieces = answers.pieces_of(tokenizer, skip_special_tokens=params.skip_special_tokens)
    made = [chat.to_parser(request, answers, prompt_tail=tail) for _ in range(params.n)]
    return [ParsedAnswer(parser, pieces) for parser in made if parser is not None] or None


def generate(
    exchange: Exchange,
    request: Common,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    label: str,
    answers: list[ParsedAnswer] | None = None,
    structure: Structure = FREE,
) -> Events:
    """The events of one prompt, parsed where there are parsers, and counted."""
    services = exchange.services
    exchange.client_label = request.request_id
    generation = Generation(
        prompt_ids=prompt_ids,
        params=params,
        label=label,
        tenant=exchange.tenant,
        priority=request.priority or 0,
        deadline_s=exchange.deadline_s(request.timeout_s),
        cache_salt=request.cache_salt or "",
        pieces=answers[0].pieces if answers and services.answers.pieces is not None else None,
        grammar=structure.grammar,
        grammar_field=structure.field,
        reasoning=structure.reasoning,
    )
    events = (exchange.crowd or services.engine).generate(generation)
    if (pace := _pace(request, services.pace)) is not None:
        events = paced(events, pace)
    if answers is not None:
        events = parsed(events, answers)
        if isinstance(request, ChatRequest) and request.include_reasoning is False:
            events = without_reasoning(events)
    return measured(events, exchange, generation)


def _pace(request: Common, usual: Pace | None) -> Pace | None:
    """How much a chunk holds, as the request says, else as usual; None: what is there."""
    options = request.stream_options or StreamOptions()
    tokens, wait_ms = options.stream_interval or request.stream_interval, options.stream_interval_ms
    return usual if tokens is wait_ms is None else pace_of(tokens, wait_ms)


async def streamed(exchange: Exchange, chunks: Chunks, *, shape: Shape = OPENAI) -> Response:
    """The answer that sends `chunks`; what fails before the first of them keeps its own status."""
    ping_s = exchange.services.server.ping_interval_s
    first = await started(chunks, patience_s=ping_s)
    return EventStream(
        *(first, chunks),
        request_id=exchange.request_id,
        abandon=exchange.services.abandon,
        ping_s=ping_s,
        shape=shape,
        last_comment=exchange.timing_comment if exchange.tells_timing else None,
    )
