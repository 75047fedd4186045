"""POST /v1/embeddings, /v2/embed, /pooling and /classify: one pooled answer per text."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from headrace.base.config.resolved import PoolingSpec
from headrace.base.errors import InvalidRequest
from headrace.front.client.pooling import (
    Float32,
    PooledAnswer,
    finish_embedding,
    probabilities,
)
from headrace.front.server.conversation import render
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.ids import completion_id
from headrace.front.server.openai.batch import numbered
from headrace.front.server.openai.schema import ChatRequest, parse
from headrace.front.server.pooling.content import texts_of
from headrace.front.server.pooling.engine import (
    MAX_TEXTS,
    PoolInput,
    PoolJob,
    listed,
    pooled,
    shortened,
    tokenized,
    usage_of,
)
from headrace.front.server.pooling.schema import (
    ClassifyRequest,
    CohereEmbedRequest,
    Content,
    EmbeddingRequest,
    PoolingRequest,
    TextRequest,
)
from headrace.front.server.pooling.vectors import (
    MAX_TOLD,
    binary_response,
    cohere_forms,
    encoded,
)

_TASKS = {"embed": False, "classify": True, "token_embed": False, "token_classify": True}
_EMBED = ("embed", "token_embed")
BINARY = ("bytes", "bytes_only")
_PER_TOKEN = {"token_embed", "token_classify"}


async def post_embeddings(exchange: Exchange, document: Any) -> Response:
    """POST /v1/embeddings."""
    request = parse(document, EmbeddingRequest)
    spec = one_vector(exchange)
    answers = await _pooled_texts(exchange, request, how=spec.how, head=False)
    vectors = embeddings(exchange, answers, request.dimensions, _normalizes(request))
    return _sent(exchange, request, vectors, usage_of(answers), kinds=("embedding", "embd"))


def _sent(
    exchange: Exchange,
    request: TextRequest,
    vectors: list[Float32],
    usage: dict[str, Any],
    *,
    kinds: tuple[str, str],
) -> Response:
    """The vectors in the form that was asked for; `kinds`: what one of them is called, and the answer's id."""
    kind, ident = kinds
    form, big = request.encoding_format, request.endianness == "big"
    if form in BINARY:
        document = listed(exchange, request.model, [], usage, kind=ident)
        told = form == "bytes"
        return binary_response(vectors, document, request.embed_dtype, big=big, told=told)
    name = "data" if kind == "pooling" else kind
    data = [
        {"object": kind, "index": i, name: encoded(one, form, number=request.embed_dtype, big=big)}
        for i, one in enumerate(vectors)
    ]
    return json_response(listed(exchange, request.model, data, usage, kind=ident))


def _normalizes(request: EmbeddingRequest | PoolingRequest) -> bool | None:
    """Whether embeddings get length 1; None: as the model was trained."""
    given, other = request.normalize, request.use_activation
    if given is not None and other is not None and given != other:
        raise InvalidRequest(
            f"use_activation: {other} given, normalize is {given}; for embeddings they are one",
            field="use_activation",
        )
    return other if given is None else given


async def post_cohere_embed(exchange: Exchange, document: Any) -> Response:
    """POST /v2/embed."""
    request = parse(document, CohereEmbedRequest)
    services = exchange.services
    services.model_name(request.model)
    one_vector(exchange)
    field, texts = _cohere_texts(request)
    exchange.hold_place()
    truncate = None if request.truncate == "NONE" else request.max_tokens or -1
    side = "left" if request.truncate == "START" else "right"
    ids = [
        await tokenized(exchange, text, field=field, truncate=truncate, side=side) for text in texts
    ]
    job = PoolJob(how=services.text.pooling.how, timeout_s=request.timeout_s)
    answers = await pooled(exchange, [PoolInput(ids=one) for one in ids], job)
    vectors = embeddings(exchange, answers, request.output_dimension, None)
    billed = {"input_tokens": sum(answer.num_prompt for answer in answers)}
    return json_response(
        {
            "id": completion_id("embd"),
            "embeddings": cohere_forms(
                np.stack(vectors), list(request.embedding_types or ("float",))
            ),
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": billed},
            "response_type": "embeddings_by_type",
        }
    )


def _cohere_texts(request: CohereEmbedRequest) -> tuple[str, list[str]]:
    """What is to be embedded, and the name it came under."""
    given = [n for n in ("texts", "inputs", "images") if getattr(request, n) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "texts: exactly one of texts, inputs and images is needed", field="texts"
        )
    if request.images is not None:
        raise InvalidRequest(
            "images: images are not accepted by this model (only text is)", field="images"
        )
    found: list[str | Content] = [*(request.texts or request.inputs or [])]
    return given[0], texts_of(found, given[0])


async def post_pooling(exchange: Exchange, document: Any) -> Response:
    """POST /pooling: any task, vectors as they come."""
    request = parse(document, PoolingRequest)
    spec = exchange.services.text.pooling
    task = request.task or ("classify" if spec.labels else _EMBED[spec.how == "tokens"])
    head, how = _TASKS[task], _how(exchange, request, task)
    if request.pooling == "step" and request.step_tag_id is None:
        raise InvalidRequest("step_tag_id: needed with pooling step", field="step_tag_id")
    inputs = await _inputs(exchange, request)
    answers = await _pooled_inputs(exchange, request, inputs, how=how, head=head)
    rows = [_told(exchange, request, answer, head=head) for answer in answers]
    if request.pooling == "step":
        marks = [np.asarray(one.ids) == request.step_tag_id for one in inputs]
        rows = [row[mark] for row, mark in zip(rows, marks, strict=True)]
    vectors = [row if how == "tokens" else row[0] for row in rows]
    return _sent(exchange, request, vectors, usage_of(answers), kinds=("pooling", "pool"))


async def post_classify(exchange: Exchange, document: Any) -> Response:
    """POST /classify: the probabilities of all labels, and the likeliest one."""
    request = parse(document, ClassifyRequest)
    spec = exchange.services.text.pooling
    _need_head(exchange)
    answers = await _pooled_texts(exchange, request, how=spec.how, head=True)
    data = []
    for i, answer in enumerate(answers):
        scores = _scores(exchange, answer.values, request.use_activation)[0]
        data.append(
            {
                "index": i,
                "label": spec.labels[int(scores.argmax())],
                "probs": scores.tolist(),
                "num_classes": len(spec.labels),
            }
        )
    return json_response(listed(exchange, request.model, data, usage_of(answers), kind="classify"))


def _how(exchange: Exchange, request: PoolingRequest, task: str) -> str:
    given = request.pooling
    if given in ("all", "step") or (given is None and task in _PER_TOKEN):
        return "tokens"
    if given is not None and task in _PER_TOKEN:
        raise InvalidRequest(
            f"pooling: {given!r} given; task {task} takes all or step", field="pooling"
        )
    return given or exchange.services.text.pooling.how


def one_vector(exchange: Exchange) -> PoolingSpec:
    """The model's pooling; refused where there is a vector per token and none for a text."""
    spec = exchange.services.text.pooling
    if spec.how == "tokens":
        raise InvalidRequest(
            "the model has a vector for every token and none for a text; use /pooling, /score or /rerank",
            field="model",
        )
    return spec


def _need_head(exchange: Exchange) -> None:
    if not exchange.services.text.pooling.labels:
        raise InvalidRequest("the model has no classification head", field="model")


async def _pooled_texts(
    exchange: Exchange, request: TextRequest, *, how: str, head: bool
) -> list[PooledAnswer]:
    inputs = await _inputs(exchange, request)
    return await _pooled_inputs(exchange, request, inputs, how=how, head=head)


async def _pooled_inputs(
    exchange: Exchange, request: TextRequest, inputs: list[PoolInput], *, how: str, head: bool
) -> list[PooledAnswer]:
    if head:
        _need_head(exchange)
    job = PoolJob(
        how=how,
        head=head,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
    )
    return await pooled(exchange, inputs, job)


async def _inputs(exchange: Exchange, request: TextRequest) -> list[PoolInput]:
    """What is to be pooled, tokenized; takes the key's place first."""
    services = exchange.services
    services.model_name(request.model)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("input: exactly one of input and messages is needed", field="input")
    exchange.hold_place()
    if request.messages is not None:
        return await _conversations(exchange, request, request.messages)
    assert request.input is not None
    most, truncate = services.text.max_model_len, request.truncate_prompt_tokens
    given = _listed_inputs(request.input)
    _check_number(request, len(given), "input")
    found = []
    for one in given:
        if isinstance(one, str):
            ids = await tokenized(
                *(exchange, one),
                field="input",
                special=request.add_special_tokens is not False,
                truncate=truncate,
                side=request.truncation_side,
            )
        else:
            services.tokenizer.check_ids(one, field="input")
            ids = shortened(one, truncate, most=most, field="input", side=request.truncation_side)
        found.append(PoolInput(ids=ids))
    return found


async def _conversations(
    exchange: Exchange, request: TextRequest, messages: list[Any]
) -> list[PoolInput]:
    """One conversation, or each of a list of them."""
    many = isinstance(messages[0], list)
    if any(isinstance(one, list) != many for one in messages):
        raise InvalidRequest(
            "messages: one conversation, or a list of conversations; a mixture was given",
            field="messages",
        )
    _check_number(request, len(messages) if many else 1, "messages")
    found = []
    for number, one in enumerate(messages if many else [messages]):
        with numbered(number) if many else nullcontext():
            found.append(PoolInput(ids=await _rendered(exchange, request, one)))
    return found


async def _rendered(
    exchange: Exchange, request: TextRequest, messages: list[dict[str, Any]]
) -> list[int]:
    chat = ChatRequest(
        messages=messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    most, side = exchange.services.text.max_model_len, request.truncation_side
    ids = await render(exchange, chat)
    return shortened(ids, request.truncate_prompt_tokens, most=most, field="messages", side=side)


def _check_number(request: TextRequest, number: int, field: str) -> None:
    """Before anything is tokenized: what cannot be answered in the form that is asked for."""
    if number > MAX_TEXTS:
        raise InvalidRequest(
            f"{field}: {number} texts given, at most {MAX_TEXTS} are allowed", field=field
        )
    if request.encoding_format == "bytes" and number > MAX_TOLD:
        raise InvalidRequest(
            f"encoding_format: 'bytes' tells in a header where each vector stands, at most {MAX_TOLD} of them; "
            f"{number} texts given: send 'bytes_only'",
            field="encoding_format",
        )


def _listed_inputs(given: str | list[Any]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if all(isinstance(one, int) for one in given):
        return [msgspec.convert(given, list[int])]
    if not (all(isinstance(one, str) for one in given) or all(isinstance(o, list) for o in given)):
        raise InvalidRequest(
            "input: one text, one list of ids, or a list of only texts or only lists", field="input"
        )
    return given


def embeddings(
    exchange: Exchange,
    answers: list[PooledAnswer],
    dimensions: int | None,
    normalize: bool | None,
) -> list[Float32]:
    """One embedding per answer."""
    spec = exchange.services.text.pooling
    _check_dimensions(exchange, dimensions)
    wanted = spec.normalize if normalize is None else normalize
    return [
        finish_embedding(answer.values[0], dimensions=dimensions, normalize=wanted)
        for answer in answers
    ]


def _check_dimensions(exchange: Exchange, dimensions: int | None) -> None:
    spec = exchange.services.text.pooling
    if dimensions is None or spec.matryoshka is None:
        if dimensions is not None:
            raise InvalidRequest(
                f"dimensions: {dimensions} given; the model was not trained for shorter embeddings "
                "(its config.json has neither is_matryoshka nor matryoshka_dimensions)",
                field="dimensions",
            )
        return
    if spec.matryoshka and dimensions not in spec.matryoshka:
        known = ", ".join(str(one) for one in spec.matryoshka)
        raise InvalidRequest(
            f"dimensions: {dimensions} given; allowed: {known}", field="dimensions"
        )


def _told(
    exchange: Exchange, request: PoolingRequest, answer: PooledAnswer, *, head: bool
) -> Float32:
    if head:
        return _scores(exchange, answer.values, request.use_activation)
    spec = exchange.services.text.pooling
    _check_dimensions(exchange, request.dimensions)
    asked = _normalizes(request)
    wanted = spec.normalize if asked is None else asked
    return finish_embedding(answer.values, dimensions=request.dimensions, normalize=wanted)


def _scores(exchange: Exchange, logits: Float32, use_activation: bool | None) -> Float32:
    activation = exchange.services.text.pooling.activation
    return probabilities(logits, "none" if use_activation is False else activation)
