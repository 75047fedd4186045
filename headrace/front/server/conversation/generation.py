"""Token ids in, events out: what /inference/v1/generate and the gRPC services generate with.
Nothing is rendered."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Events
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import Spans
from headrace.front.server.conversation.pipeline import generate, parsers
from headrace.front.server.conversation.prompts import spans
from headrace.front.server.conversation.request import (
    Common,
    NumScores,
    StreamOptions,
    parse,
    sampling_params,
)
from headrace.front.server.conversation.resolved import Conversation, as_sent, run_options
from headrace.front.server.conversation.stages import without_reasoning
from headrace.front.server.conversation.structured import (
    Structure,
    plain_structure,
    structure_of,
)
from headrace.front.server.http.auth import completion_id, own_id
from headrace.front.server.http.limits import Count, Keywords, Name, TokenId


@dataclass(frozen=True, kw_only=True)
class GenerateReply:
    """What all chunks of one answer share."""

    id: str
    model: str
    created: int
    num_choices: int
    sampling: TokenSampling
    request: GenerateRequest
    as_vllm: bool = False
    tells_mask: bool = False
    spans: Spans | None = None


def begin_generate(
    context: RequestContext,
    request: GenerateRequest,
    chat: Conversation | None = None,
    *,
    media: tuple[MediaInput, ...] = (),
) -> tuple[Events, GenerateReply]:
    """The events of the answer, which run once they are read, and what its chunks share. With
    `chat` the answer looks as that asks for, and output_mode derender parses it. `media`: what
    placeholders among the ids stand for."""
    services = context.services
    model = services.model_name(request.model)
    _refuse(request)
    sampling = sampling_of(request)
    limit = sampling.max_completion_tokens
    params = sampling_params(
        sampling,
        defaults=services.text.generation_defaults,
        max_n=services.server.max_n,
        best_of=sampling.best_of,
        max_tokens=sampling.max_tokens if limit is None else limit,
        logprobs=sampling.logprobs,
    )
    params = _with_mask(params, sampling, always=services.server.return_sampling_mask)
    params = _with_candidates(params, sampling)
    services.tokenizer.check_ids(request.token_ids, field="token_ids")
    context.hold_place()
    label = _label(context, request)
    parsing = chat if request.output_mode == "derender" else None
    answers = None
    with nullcontext() if chat is None else as_sent(chat.sent):
        if parsing is not None:
            answers = parsers(context, parsing.form, request.token_ids, params)
        structure = _structure(context, request, sampling, chat)
        adapter = "" if model in services.text.model_names else model
        events = generate(
            context,
            request.token_ids,
            params,
            run_options(sampling, adapter),
            label=label,
            answers=answers,
            structure=structure,
            prompt_field="token_ids",
            media=media,
        )
    if parsing is not None and not parsing.shows_reasoning:
        events = without_reasoning(events)
    reply = GenerateReply(
        id=label,
        model=model,
        created=int(time.time()),
        num_choices=params.n,
        sampling=sampling,
        request=request,
        as_vllm=services.server.compat == "vllm",
        tells_mask=params.sampling_mask,
        spans=partial(spans, services.tokenizer) if sampling.return_token_offsets else None,
    )
    return events, reply


def _label(context: RequestContext, request: GenerateRequest) -> str:
    asked = request.request_id
    return completion_id("gen") if asked is None else own_id(context.tenant, asked)


def _with_mask(params: SamplingParams, sampling: TokenSampling, *, always: bool) -> SamplingParams:
    """With what each token was drawn among, which is told beside its log-probability, where that is
    asked for. `always`: unless the request says no."""
    asked = sampling.return_sampling_mask
    if not (always if asked is None else asked):
        return params
    scores = 0 if params.logprobs is None else params.logprobs
    return msgspec.structs.replace(params, sampling_mask=True, logprobs=scores)


def _with_candidates(params: SamplingParams, sampling: TokenSampling) -> SamplingParams:
    """With the tokens that are scored along the prompt: those that each of its tokens is scored
    beside."""
    candidates = sampling.prompt_logprob_token_ids
    if candidates is None:
        return params
    field = "prompt_logprob_token_ids"
    for name in ("stream", "logprobs", "prompt_logprobs", "logprob_token_ids"):
        value = getattr(sampling, name)
        if value is not None and value is not False:
            raise InvalidRequest(f"{field}: does not go with {name}", field=field)
    return msgspec.structs.replace(
        params, prompt_logprobs=0, logprobs=0, logprob_token_ids=tuple(candidates)
    )


def _structure(
    context: RequestContext,
    request: GenerateRequest,
    sampling: TokenSampling,
    chat: Conversation | None,
) -> Structure:
    """What the answer must look like: of a chat behind its reasoning, and with its tools' calls."""
    if chat is None:
        return plain_structure(sampling)
    services = context.services
    tail = services.answers.prompt_tail(services.tokenizer, request.token_ids)
    return structure_of(chat.form, services.answers, prompt_tail=tail)


def _refuse(request: GenerateRequest) -> None:
    """Tensors of a client's making are never taken."""
    for field in ("features", "reasoning_parser_kwargs"):
        if getattr(request, field):
            raise InvalidRequest(f"{field}: not accepted by this server", field=field)


def sampling_of(request: GenerateRequest) -> TokenSampling:
    """The sampling fields, checked, together with those that stand beside them."""
    beside = {
        "stream": request.stream or None,
        "stream_options": msgspec.to_builtins(request.stream_options),
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "kv_transfer_params": request.kv_transfer_params,
    }
    fields = {name: value for name, value in beside.items() if value is not None}
    return parse({**request.sampling_params, **fields}, TokenSampling)


MAX_TOKENS = 2**22


class TokenSampling(Common, frozen=True, kw_only=True):
    """How to sample; as in /v1/completions. `prompt_logprob_token_ids`: tokens whose
    log-probabilities are told at every position of the prompt behind `prompt_logprob_start`.
    `return_sampling_mask`: the answer tells of each token the ids that it was drawn among."""

    best_of: Annotated[int, Meta(ge=1)] | None = None
    logprobs: NumScores | None = None
    max_completion_tokens: Count | None = None
    prompt_logprob_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=128)] | None
    ) = None
    prompt_logprob_start: Count = 0
    return_sampling_mask: bool | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /inference/v1/generate: what the render routes answer with. With output_mode derender
    the answer is the chat completion, parsed as `parse_context` says."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
    sampling_params: Keywords = {}
    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text", "derender"] = "tokens"
    parse_context: Keywords | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    features: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
