"""POST /v1/embeddings, /pooling and /classify: one pooled answer per text."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from headrace.base import extensions
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.front.client.pooling import Float32, PooledAnswer, finish_embedding, probabilities
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import prompt_with_media
from headrace.front.server.conversation.pooling import (
    MAX_TEXTS,
    PoolInput,
    PoolJob,
    check_dimensions,
    embeddings,
    listed,
    one_vector,
    pooled,
    shortened,
    tokenized,
    usage_of,
)
from headrace.front.server.conversation.request import ChatRequest, numbered, parse
from headrace.front.server.conversation.resolved import prompt_source
from headrace.front.server.pooling.content import pool_input_of, sent_of
from headrace.front.server.pooling.long_texts import (
    longest_of,
    pooled_as_one,
    pooled_in_chunks,
)
from headrace.front.server.pooling.processed import post_data
from headrace.front.server.pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    Inputs,
    Parts,
    PoolingContent,
    PoolingRequest,
    TextRequest,
)
from headrace.front.server.pooling.vectors import (
    MAX_IN_HEADER,
    binary_response,
    encoded,
)

_TASKS = {"embed": False, "classify": True, "token_embed": False, "token_classify": True}


_EMBED = ("embed", "token_embed")


BINARY = ("bytes", "bytes_only")


_WAYS = ("cls", "last", "mean", "all", "step")
_PER_TOKEN = {"token_embed", "token_classify"}


MAX_PADDED_TOKENS = 2**20
"""A few bytes of a body become a context's length each: so many take some milliseconds."""


async def post_embeddings(context: RequestContext, document: Any) -> Response:
    """POST /v1/embeddings."""
    request = parse(document, EmbeddingRequest)
    spec = one_vector(context)
    if request.late_chunking:
        context.services.base_name(request.model)
        context.hold_place()
        special = request.add_special_tokens is not False
        job = _job(request, how="tokens", head=False)
        answers = await pooled_as_one(context, request.input, job, special=special)
    else:
        inputs = await _inputs(context, request, longest=longest_of(context))
        job = _job(request, how=spec.how, head=False)
        answers = await pooled_in_chunks(context, inputs, job)
    vectors = embeddings(context, answers, request.dimensions, _normalizes(request))
    return _sent(context, request, vectors, usage_of(answers), kinds=("embedding", "embd"))


def _sent(
    context: RequestContext,
    request: TextRequest,
    vectors: list[Float32],
    usage: dict[str, Any],
    *,
    kinds: tuple[str, str],
) -> Response:
    """The vectors in the form that was asked for; `kinds`: what one of them is called, and the
    answer's id."""
    kind, ident = kinds
    form, big = request.encoding_format, request.endianness == "big"
    if form in BINARY:
        document = listed(context, request.model, [], usage, kind=ident)
        in_header = form == "bytes"
        return binary_response(vectors, document, request.embed_dtype, big=big, in_header=in_header)
    name = "data" if kind == "pooling" else kind
    data = [
        {"object": kind, "index": i, name: encoded(one, form, number=request.embed_dtype, big=big)}
        for i, one in enumerate(vectors)
    ]
    return json_response(listed(context, request.model, data, usage, kind=ident))


def _normalizes(request: EmbeddingRequest | PoolingRequest) -> bool | None:
    """Whether embeddings get length 1; None: as the model was trained."""
    normalize, other = request.normalize, request.use_activation
    if normalize is not None and other is not None and normalize != other:
        raise InvalidRequest(
            f"use_activation: {other} given, normalize is {normalize}; for embeddings they are one",
            field="use_activation",
        )
    return other if normalize is None else normalize


async def post_pooling(context: RequestContext, document: Any) -> Response:
    """POST /pooling: any task, vectors as they come; or data for an IO processor."""
    if isinstance(document, dict) and "data" in document:
        return await post_data(context, document)
    request = parse(document, PoolingRequest)
    spec = context.services.text.pooling
    task = request.task or ("classify" if spec.labels else _EMBED[spec.how == "tokens"])
    head, how = _TASKS[task], _how(context, request, task)
    if request.pooling == "step" and request.step_tag_id is None:
        raise InvalidRequest("step_tag_id: needed with pooling step", field="step_tag_id")
    inputs = await _inputs(context, request)
    answers = await _pooled_inputs(context, request, inputs, how=how, head=head)
    rows = [_row(context, request, answer, head=head) for answer in answers]
    if request.pooling == "step":
        marks = [np.asarray(one.ids) == request.step_tag_id for one in inputs]
        rows = [row[mark] for row, mark in zip(rows, marks, strict=True)]
    elif spec.ends is not None and how == "tokens":
        shares = [inside(spec.ends, one.ids, weights=head) for one in inputs]
        rows = [row[share] for row, share in zip(rows, shares, strict=True)]
    vectors = [row if how == "tokens" else row[0] for row in rows]
    return _sent(context, request, vectors, usage_of(answers), kinds=("pooling", "pool"))


async def post_classify(context: RequestContext, document: Any) -> Response:
    """POST /classify: the probabilities of all labels, and the likeliest one."""
    request = parse(document, ClassifyRequest)
    if request.encoding_format != "float":
        raise InvalidRequest(
            f"encoding_format: {request.encoding_format!r} given; probabilities are told as "
            "'float' "
            "(/pooling with task classify has the other forms)",
            field="encoding_format",
        )
    spec = context.services.text.pooling
    _need_head(context)
    answers = await _pooled_texts(context, request, how=spec.how, head=True)
    data = []
    for i, answer in enumerate(answers):
        scores = _scores(context, answer.values, request.use_activation)[0]
        data.append(
            {
                "index": i,
                "label": spec.labels[int(scores.argmax())],
                "probs": scores.tolist(),
                "num_classes": len(spec.labels),
            }
        )
    return json_response(listed(context, request.model, data, usage_of(answers), kind="classify"))


def inside(ends: tuple[int, int], ids: list[int], *, weights: bool) -> slice:
    """The tokens of a text that have a vector, or a weight, of their own: see PoolingSpec.ends."""
    last = len(ids) - (weights and ids[-1] == ends[1])
    return slice(int(ids[0] == ends[0]), last)


def _how(context: RequestContext, request: PoolingRequest, task: str) -> str:
    pooling = request.pooling
    known = *_WAYS, *extensions.allowed(extensions.POOLERS)
    if pooling is not None and pooling not in known:
        raise InvalidRequest(
            f"pooling: {pooling!r:.100} given; one of {', '.join(known)} is wanted", field="pooling"
        )
    if pooling in ("all", "step") or (pooling is None and task in _PER_TOKEN):
        return "tokens"
    if pooling is not None and task in _PER_TOKEN:
        raise InvalidRequest(
            f"pooling: {pooling!r} given; task {task} takes all or step", field="pooling"
        )
    return pooling or context.services.text.pooling.how


def _need_head(context: RequestContext) -> None:
    if not context.services.text.pooling.labels:
        raise InvalidRequest("the model has no classification head", field="model")


async def _pooled_texts(
    context: RequestContext, request: TextRequest, *, how: str, head: bool
) -> list[PooledAnswer]:
    inputs = await _inputs(context, request)
    return await _pooled_inputs(context, request, inputs, how=how, head=head)


async def _pooled_inputs(
    context: RequestContext, request: TextRequest, inputs: list[PoolInput], *, how: str, head: bool
) -> list[PooledAnswer]:
    if head:
        _need_head(context)
    return await pooled(context, inputs, _job(request, how=how, head=head))


def _job(request: TextRequest, *, how: str, head: bool) -> PoolJob:
    return PoolJob(
        how=how,
        head=head,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
    )


async def _inputs(
    context: RequestContext, request: TextRequest, *, longest: int = 0
) -> list[PoolInput]:
    """What is to be pooled, tokenized and cut or filled up as is asked for, of at most `longest`
    tokens if that is more than the model can hold; takes the key's place first."""
    if request.padding != "max_length":
        return await _tokenized_inputs(context, request, longest=longest)
    pad = context.services.tokenizer.special_id("pad_token")
    if pad is None:
        raise InvalidRequest("padding: this tokenizer has no padding token", field="padding")
    most, number = context.services.text.max_model_len, _number_of_inputs(request)
    if most * number > MAX_PADDED_TOKENS:
        raise InvalidRequest(
            f"padding: {number} inputs of {most} tokens; {MAX_PADDED_TOKENS} tokens are allowed "
            "with it in one request",
            field="padding",
        )
    pool_inputs = await _tokenized_inputs(context, request, longest=longest)
    if any(one.media for one in pool_inputs):
        raise InvalidRequest("padding: does not go with images and video", field="padding")
    return [PoolInput(ids=[*one.ids, *[pad] * (most - len(one.ids))]) for one in pool_inputs]


async def _tokenized_inputs(
    context: RequestContext, request: TextRequest, *, longest: int
) -> list[PoolInput]:
    services = context.services
    services.base_name(request.model)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("input: exactly one of input and messages is needed", field="input")
    context.hold_place()
    if request.messages is not None:
        return await _conversations(context, request, request.messages)
    assert request.input is not None
    most, truncate = services.text.max_model_len, request.truncate_prompt_tokens
    entries = _listed_inputs(request.input)
    _check_number(request, len(entries), "input")
    pool_inputs = []
    for place, sent in enumerate(entries):
        one = sent
        if isinstance(one, PoolingContent):
            content = sent_of(one, f"input[{place}]", context)
            if isinstance(content, Parts):
                pool_inputs.append(await pool_input_of(context, content))
                continue
            one = content
        if isinstance(one, str):
            ids = await tokenized(
                context,
                one,
                field="input",
                special=request.add_special_tokens is not False,
                truncate=truncate,
                side=request.truncation_side,
                longest=longest,
            )
        else:
            services.tokenizer.check_ids(one, field="input")
            ids = shortened(
                one,
                truncate,
                most=most,
                field="input",
                side=request.truncation_side,
                longest=longest,
            )
        pool_inputs.append(PoolInput(ids=ids))
    return pool_inputs


async def _conversations(
    context: RequestContext, request: TextRequest, messages: list[Any]
) -> list[PoolInput]:
    """One conversation, or each of a list of them."""
    many = isinstance(messages[0], list)
    if any(isinstance(one, list) != many for one in messages):
        raise InvalidRequest(
            "messages: one conversation, or a list of conversations; a mixture was given",
            field="messages",
        )
    _check_number(request, len(messages) if many else 1, "messages")
    pool_inputs = []
    for number, one in enumerate(messages if many else [messages]):
        with numbered(number) if many else nullcontext():
            ids, media = await _rendered(context, request, one)
            pool_inputs.append(PoolInput(ids=ids, media=media))
    return pool_inputs


async def _rendered(
    context: RequestContext, request: TextRequest, messages: list[dict[str, Any]]
) -> tuple[list[int], tuple[MediaInput, ...]]:
    chat = ChatRequest(
        messages=messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    most, side = context.services.text.max_model_len, request.truncation_side
    ids, media = await prompt_with_media(context, prompt_source(chat))
    truncate = request.truncate_prompt_tokens
    if media and truncate is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: does not go with images and video, which have no parts",
            field="truncate_prompt_tokens",
        )
    return shortened(ids, truncate, most=most, field="messages", side=side), media


def _number_of_inputs(request: TextRequest) -> int:
    if request.input is not None:
        return len(_listed_inputs(request.input))
    return sum(isinstance(one, list) for one in request.messages or []) or 1


def _check_number(request: TextRequest, number: int, field: str) -> None:
    """Before anything is tokenized: what cannot be answered in the form that is asked for."""
    if number > MAX_TEXTS:
        raise InvalidRequest(
            f"{field}: {number} texts given, at most {MAX_TEXTS} are allowed", field=field
        )
    if request.encoding_format == "bytes" and number > MAX_IN_HEADER:
        raise InvalidRequest(
            "encoding_format: 'bytes' tells in a header where each vector stands, at most "
            f"{MAX_IN_HEADER} of them; "
            f"{number} texts given: send 'bytes_only'",
            field="encoding_format",
        )


def _listed_inputs(inputs: Inputs) -> list[str | list[int] | PoolingContent]:
    if isinstance(inputs, str | PoolingContent):
        return [inputs]
    if inputs and isinstance(inputs[0], int):
        with suppress(msgspec.ValidationError):
            return [msgspec.convert(inputs, list[int])]
    texts = all(isinstance(one, str | PoolingContent) for one in inputs)
    if not texts and not all(isinstance(one, list) for one in inputs):
        raise InvalidRequest(
            "input: one text, one list of ids, or a list of only texts (or objects) or only lists",
            field="input",
        )
    return [one for one in inputs if not isinstance(one, int)]


def _row(
    context: RequestContext, request: PoolingRequest, answer: PooledAnswer, *, head: bool
) -> Float32:
    if head:
        return _scores(context, answer.values, request.use_activation)
    spec = context.services.text.pooling
    check_dimensions(context, request.dimensions)
    asked = _normalizes(request)
    wanted = spec.normalize if asked is None else asked
    return finish_embedding(answer.values, dimensions=request.dimensions, normalize=wanted)


def _scores(context: RequestContext, logits: Float32, use_activation: bool | None) -> Float32:
    activation = context.services.text.pooling.activation
    return probabilities(logits, "none" if use_activation is False else activation)
