"""A conversation, resolved: each dialect's request becomes a frozen `Conversation` once; no later
step reads the body again.

A dialect translates its request into the fields of `ChatRequest` (`TranslatedRequest`), which are
checked as every chat is. What is wrong with them is told in the words of the request as it was sent
(`as_sent`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.base.config.server_options import ServerSettings
from headrace.base.errors import InvalidRequest, RequestError
from headrace.base.wire.request import SamplingParams
from headrace.base.wire.retention import EngineHints
from headrace.base.wire.transfer import KVTransferParams
from headrace.front.client.events import Events
from headrace.front.server.conversation.calls import (
    SENT_AS,
    as_function_calls,
    customized,
    with_functions,
    with_tools,
)
from headrace.front.server.conversation.context import (
    ServedModel,
    StreamInterval,
    stream_interval_of,
)
from headrace.front.server.conversation.request import (
    NO_STREAM_OPTIONS,
    ChatRequest,
    Common,
    chat_params,
    parse,
)
from headrace.front.server.conversation.structured import AnswerForm, form_of, narrowed
from headrace.front.text.chat import parts_text


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """How many ids of a prompt are kept, and of which end; -1: as many as the model can hold with
    one token to spare."""

    keep: int
    from_start: bool = False

    def __call__(self, prompt_ids: list[int], *, max_model_len: int) -> list[int]:
        """The ids that are kept."""
        keep = max_model_len - 1 if self.keep == -1 else self.keep
        if keep < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {keep} given; allowed: -1 or at least 1",
                field="truncate_prompt_tokens",
            )
        return prompt_ids[:keep] if self.from_start else prompt_ids[-keep:]


def truncation_of(request: Common) -> Truncation | None:
    """What the request says of it; None: a prompt that is too long is refused."""
    if request.truncate_prompt_tokens is None:
        return None
    from_start = request.truncation_side == "right"
    return Truncation(keep=request.truncate_prompt_tokens, from_start=from_start)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a generation runs, apart from its sampling. `interval`: what a chunk of its stream holds;
    None: as usual on this server. `decoder_ids`, `hints`: see Generation."""

    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    client_label: str | None = None
    interval: StreamInterval | None = None
    adapter: str = ""
    decoder_ids: tuple[int, ...] = ()
    hints: KVTransferParams | EngineHints | None = None


def run_options(request: Common, adapter: str = "") -> RunOptions:
    """What the request says of it. `adapter`: the one that it names as its model."""
    options = request.stream_options or NO_STREAM_OPTIONS
    return RunOptions(
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
        client_label=request.request_id,
        interval=stream_interval_of(
            options.stream_interval or request.stream_interval, options.stream_interval_ms
        ),
        adapter=adapter,
        hints=_hints_of(request)
        if request.kv_retention or request.routing_key
        else request.kv_transfer_params,
    )


def _hints_of(request: Common) -> EngineHints:
    """All that the request says to the engine beside its prompt."""
    return EngineHints(
        transfer=request.kv_transfer_params,
        retention=tuple(request.kv_retention or ()),
        routing_key=request.routing_key or "",
    )


@dataclass(frozen=True, kw_only=True)
class AnswerFields:
    """What an answer shows beside its text. `scores`: log-probabilities; `tokens_as_ids`: under the
    ids of their tokens; `as_vllm`: a stream's last delta of a choice carries its finish_reason, and
    the sampled token leads its alternatives; `echo`: text that the answer repeats before its own;
    `metrics`: where the time went; `offers_tools`: it may begin with a call; `stores`: it is kept;
    `attention_dtype`: how captured attention is written; `transfer`: what of its KV passes between
    servers."""

    num_choices: int = 1
    streams: bool = False
    with_usage: bool = False
    continuous_usage: bool = False
    pads: bool = False
    as_vllm: bool = False
    echo: str = ""
    metrics: bool = False
    offers_tools: bool = False
    stores: bool = False
    scores: bool = False
    prompt_scores: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    token_offsets: bool = False
    prompt_text: bool = False
    attention_dtype: str | None = None
    service_tier: str | None = None
    transfer: KVTransferParams | None = None

    def transferred(self, label: str) -> dict[str, object] | None:
        """The answer's `kv_transfer_params`; `label`: its public id."""
        return None if self.transfer is None else self.transfer.answer(label)


def answer_fields(request: Common, settings: ServerSettings, *, scores: bool) -> AnswerFields:
    """What the request and the server's settings say of it; `scores`: whether it wants
    log-probabilities, which each route asks for in its own way."""
    options = request.stream_options or NO_STREAM_OPTIONS
    with_usage = options.include_usage or settings.force_include_usage
    as_ids = request.return_tokens_as_token_ids
    return AnswerFields(
        num_choices=request.n or 1,
        streams=bool(request.stream),
        with_usage=with_usage,
        continuous_usage=with_usage and options.continuous_usage_stats,
        pads=bool(options.include_obfuscation),
        as_vllm=settings.compat == "vllm",
        metrics=settings.per_request_metrics and (request.n or 1) == 1,
        scores=scores,
        prompt_scores=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=settings.return_tokens_as_token_ids if as_ids is None else as_ids,
        token_offsets=bool(request.return_token_offsets),
        prompt_text=bool(request.return_prompt_text),
        attention_dtype=request.attn_capture_dtype,
        service_tier=request.service_tier,
        transfer=request.kv_transfer_params,
    )


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """What the chat template is given. `template`: the request's own; `opens`: the prompt ends with
    the beginning of an answer; `continues`: with the last message, unfinished. `media_arguments`:
    how its media are processed."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template: str | None = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    opens: bool = True
    continues: bool = False
    special_tokens: bool = False
    truncation: Truncation | None = None
    media_arguments: dict[str, Any] | None = None


def prompt_source(request: ChatRequest) -> PromptSource:
    """The messages and options of a chat whose tools are functions."""
    kwargs = dict(request.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity", "documents"):
        if getattr(request, name) is not None:
            kwargs.setdefault(name, getattr(request, name))
    if request.reasoning_effort is not None:  # templates that know only on and off
        kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    return PromptSource(
        messages=request.messages,
        tools=None if request.tool_choice == "none" else request.tools,
        template=request.chat_template,
        kwargs=kwargs,
        opens=_opens(request),
        continues=bool(request.continue_final_message),
        special_tokens=bool(request.add_special_tokens),
        truncation=truncation_of(request),
        media_arguments=request.mm_processor_kwargs,
    )


def _opens(request: ChatRequest) -> bool:
    """Whether the prompt ends with the beginning of an answer."""
    opens = request.add_generation_prompt
    return not request.continue_final_message if opens is None else opens


_CALLS = frozenset({"function_call", "tool_calls"})


def without_calls(request: ChatRequest) -> bool:
    """Whether neither tools nor calls stand in the request, under old names or new ones."""
    said = any(_CALLS & m.keys() or m.get("role") == "function" for m in request.messages)
    return not (said or request.tools or request.functions or request.function_call)


@dataclass(frozen=True, kw_only=True)
class CallKinds:
    """The kinds in which a client sent its tools. `custom`: the names of custom tools; `functions`:
    under the old names."""

    custom: frozenset[str] = frozenset()
    functions: bool = False

    def as_sent(self, events: Events) -> Events:
        """The events with their calls as the client knows them."""
        if self.functions:
            events = as_function_calls(events)
        return customized(events, self.custom) if self.custom else events


def called(request: ChatRequest) -> tuple[ChatRequest, CallKinds]:
    """The chat as one with functions alone; InvalidRequest for tools that are none."""
    if without_calls(request):
        return request, CallKinds()
    converted, custom = with_functions(with_tools(request))
    return converted, CallKinds(custom=custom, functions=bool(request.functions))


_MESSAGE = re.compile(r"messages\[(\d+)\][^:]*")


@dataclass(frozen=True, kw_only=True)
class SentNames:
    """How the client named things. `places`: where message i stood in the request as sent; `names`:
    what other fields are called there."""

    places: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)


AS_CHAT = SentNames()
"""Of a request that was sent as a chat."""


@dataclass(frozen=True, kw_only=True)
class TranslatedRequest(SentNames):
    """A dialect's request as fields of `ChatRequest`. `stop`: stop strings under the dialect's own
    bound."""

    document: dict[str, Any]
    stop: tuple[str, ...] = ()

    def typed(self) -> ChatRequest:
        """The chat, checked as every chat is."""
        with as_sent(self):
            request = parse(self.document, ChatRequest)
        return msgspec.structs.replace(request, stop=list(self.stop)) if self.stop else request


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One chat, resolved. `id` is its public id; `form` what its answer must look like; `calls` the
    kinds of tools it was sent with; `fields` what its answer shows; `sent` how errors name it;
    `prediction` what the answer may be."""

    id: str
    model: str
    prompt: PromptSource
    params: SamplingParams
    form: AnswerForm
    run: RunOptions
    fields: AnswerFields
    calls: CallKinds
    sent: SentNames
    shows_reasoning: bool = True
    prediction: str = ""


def resolved(
    request: ChatRequest, served: ServedModel, *, id: str, sent: SentNames = AS_CHAT
) -> Conversation:
    """The conversation; InvalidRequest where fields contradict each other."""
    model = served.name_of(request.model)
    request, calls = called(request)
    if calls.functions:
        sent = SentNames(names=SENT_AS)
    with as_sent(sent):
        request = narrowed(request)
        params = chat_params(
            request,
            defaults=served.generation_defaults,
            max_n=served.max_n,
            max_logprobs=served.settings.max_logprobs,
        )
        return Conversation(
            id=id,
            model=model,
            prompt=prompt_source(request),
            params=params,
            form=form_of(request),
            run=run_options(request, "" if model in served.names else model),
            fields=dataclasses.replace(
                answer_fields(
                    request,
                    served.settings,
                    scores=bool(request.logprobs or request.logprob_token_ids),
                ),
                echo=_echoed(request),
                offers_tools=bool(request.tools) and request.tool_choice != "none",
                stores=bool(request.store),
            ),
            calls=calls,
            sent=sent,
            shows_reasoning=request.include_reasoning is not False,
            prediction=(
                ""
                if request.prediction is None
                else parts_text(request.prediction.content, "prediction.content")
            ),
        )


def _echoed(request: ChatRequest) -> str:
    """With `echo` the text of the last message, where the answer goes on in its role."""
    if not request.echo:
        return ""
    last = request.messages[-1]
    role = "assistant" if _opens(request) else last.get("role")
    if last.get("role") != role or last.get("content") is None:
        return ""
    return parts_text(last["content"], f"messages[{len(request.messages) - 1}].content")


def _inside(place: str, field: str) -> str:
    """Which part of the message at `place` is meant. What is no list of parts was made here;
    outputs are such lists."""
    _, bracket, part = field.partition(".content[")
    if not bracket:
        return place
    return f"{place}[{part}" if place.endswith(".output") else f"{place}{bracket}{part}"


@contextmanager
def as_sent(sent: SentNames) -> Iterator[None]:
    """Errors about fields of the resolved request become errors about the fields they came from."""
    try:
        yield
    except RequestError as error:
        name = error.field or ""
        match = _MESSAGE.match(name)
        if match is not None and int(match[1]) < len(sent.places):
            place = _inside(sent.places[int(match[1])], match[0])
        else:
            head = re.split(r"[.\[]", name, maxsplit=1)[0]
            place = sent.names.get(name) or sent.names.get(head, name)
        message = error.message
        if name and message.startswith(name + ":"):
            message = place + message.removeprefix(name)
        raise type(error)(message, field=place or None) from None
