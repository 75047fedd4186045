"""POST /score, /rerank and /generative_scoring: how well texts go together.

A model with a sequence-classification head of one label judges pairs (cross-encoder); any other embeds both sides and
compares the embeddings by cosine (bi-encoder), or their token vectors by MaxSim: where `late_interaction` is asked for,
and always where the checkpoint was made for it (late.py).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Delta, Generation
from headrace.front.client.pooling import (
    PooledAnswer,
    finish_embedding,
    max_sim,
    probabilities,
)
from headrace.front.client.together import all_of
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.ids import completion_id
from headrace.front.server.measure import measured
from headrace.front.server.openai.schema import parse
from headrace.front.server.pooling.engine import (
    PoolInput,
    PoolJob,
    listed,
    pooled,
    shortened,
    tokenized,
    usage_of,
)
from headrace.front.server.pooling.late import Sides
from headrace.front.server.pooling.schema import (
    GenerativeScoringRequest,
    RerankRequest,
    ScoreRequest,
    TextPart,
)


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes hand to the scorer. `documents` pair with `queries` one to one; one query goes with all."""

    queries: list[str]
    documents: list[str]
    activate: bool
    late: bool
    truncate: int | None
    document_tokens: int | None = None
    timeout_s: float | None = None
    fields: tuple[str, str] = ("query", "documents")


async def post_score(exchange: Exchange, document: Any) -> Response:
    """POST /score, /v1/score."""
    request = parse(document, ScoreRequest)
    model = exchange.services.model_name(request.model)
    first, queries = _side(request, ("text_1", "queries", "data_1"))
    second, documents = _side(request, ("text_2", "documents", "items", "data_2"))
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"{first}: {len(queries)} texts against {len(documents)} in {second}; 1:N or N:N is allowed",
            field=first,
        )
    wish = _Wish(
        queries=queries,
        documents=documents,
        activate=request.use_activation is not False,
        late=request.late_interaction,
        truncate=request.truncate_prompt_tokens,
        timeout_s=request.timeout_s,
        fields=(first, second),
    )
    scores, answers = await _scored(exchange, wish)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return json_response(listed(exchange, model, data, usage_of(answers), kind="score"))


async def post_rerank(exchange: Exchange, document: Any) -> Response:
    """POST /rerank, /v1/rerank, /v2/rerank: the documents by falling relevance."""
    request = parse(document, RerankRequest)
    model = exchange.services.model_name(request.model)
    texts = [one.text if isinstance(one, TextPart) else one for one in request.documents]
    wish = _Wish(
        queries=[request.query],
        documents=texts,
        activate=request.use_activation is not False,
        late=request.late_interaction,
        truncate=request.truncate_prompt_tokens,
        document_tokens=request.max_tokens_per_doc or None,
        timeout_s=request.timeout_s,
    )
    scores, answers = await _scored(exchange, wish)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: request.top_n or None]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": texts[i]}} if request.return_documents else {})
        for i in order
    ]
    used = usage_of(answers)
    return json_response(
        {
            "id": completion_id("rerank"),
            "model": model,
            "results": results,
            "usage": used,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1, "input_tokens": used["prompt_tokens"]},
            },
        }
    )


def _side(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """The texts of one side and the name they came under."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{names[0]}: exactly one of {', '.join(names)} is needed", field=names[0]
        )
    value = getattr(request, given[0])
    return given[0], [value] if isinstance(value, str) else value


async def _scored(exchange: Exchange, wish: _Wish) -> tuple[list[float], list[PooledAnswer]]:
    """One score per document, and what was pooled for them."""
    spec = exchange.services.text.pooling
    exchange.hold_place()
    if spec.head == "sequence":
        if len(spec.labels) != 1:
            raise InvalidRequest(
                f"the model classifies into {len(spec.labels)} labels; scoring needs one label or embeddings",
                field="model",
            )
        return await _crossed(exchange, wish)
    return await _compared(exchange, wish)


async def _crossed(exchange: Exchange, wish: _Wish) -> tuple[list[float], list[PooledAnswer]]:
    services = exchange.services
    spec, most = services.text.pooling, services.text.max_model_len
    queries = wish.queries * len(wish.documents) if len(wish.queries) == 1 else wish.queries
    inputs = []
    for query, text in zip(queries, wish.documents, strict=True):
        for side, field in zip((query, text), wish.fields, strict=True):
            limit = most if wish.truncate is None else None
            services.tokenizer.check_length(side, limit, field=field)
        cut = wish.document_tokens
        ids, second_at = await asyncio.to_thread(
            services.tokenizer.encode_pair, query, text, second_tokens=cut
        )
        inputs.append(
            PoolInput(
                ids=shortened(ids, wish.truncate, most=most, field=wish.fields[1]),
                second_at=second_at,
            )
        )
    job = PoolJob(how=spec.how, head=True, timeout_s=wish.timeout_s)
    answers = await pooled(exchange, inputs, job)
    activation = spec.activation if wish.activate else "none"
    return [float(probabilities(a.values, activation)[0, 0]) for a in answers], answers


async def _compared(exchange: Exchange, wish: _Wish) -> tuple[list[float], list[PooledAnswer]]:
    spec = exchange.services.text.pooling
    tokens = wish.late or spec.late is not None
    sides = Sides(exchange.services.tokenizer, spec.late)
    inputs = []
    for texts, field in zip((wish.queries, wish.documents), wish.fields, strict=True):
        is_document = field == wish.fields[1]
        truncate = sides.truncate(wish.truncate, is_document=is_document)
        for text in texts:
            ids = await tokenized(exchange, text, field=field, truncate=truncate)
            if is_document and wish.document_tokens is not None:
                ids = ids[: wish.document_tokens]
            inputs.append(PoolInput(ids=sides.prepared(ids, is_document=is_document)))
    how = "tokens" if tokens else spec.how
    answers = await pooled(exchange, inputs, PoolJob(how=how, timeout_s=wish.timeout_s))
    vectors = [
        finish_embedding(answer.values, dimensions=None, normalize=True) for answer in answers
    ]
    for i in range(len(wish.queries), len(vectors)):
        vectors[i] = vectors[i][sides.compared(inputs[i].ids)] if tokens else vectors[i]
    queries, documents = vectors[: len(wish.queries)], vectors[len(wish.queries) :]
    pairs = zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True)
    if tokens:
        return [max_sim(query, text) for query, text in pairs], answers
    return [float(np.dot(query[0], text[0])) for query, text in pairs], answers


async def post_generative_scoring(exchange: Exchange, document: Any) -> Response:
    """POST /generative_scoring: p(first label) as the token after query and item (API-18)."""
    request = parse(document, GenerativeScoringRequest)
    services = exchange.services
    model = services.model_name(request.model)
    services.tokenizer.check_ids(request.label_token_ids, field="label_token_ids")
    exchange.hold_place()
    prompts = await _judged_prompts(exchange, request)
    deadline_s = exchange.deadline_s(request.timeout_s)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0,
        logprob_token_ids=tuple(request.label_token_ids),
    )
    label = completion_id("score")

    async def one(number: int, ids: list[int]) -> float:
        generation = Generation(
            prompt_ids=ids,
            params=params,
            label=f"{label}-{number}",
            tenant=exchange.tenant,
            priority=request.priority or 0,
            deadline_s=deadline_s,
            cache_salt=request.cache_salt or "",
        )
        events = services.engine.generate(generation)
        values: list[float] = []
        async with aclosing(measured(events, exchange)) as told:
            async for event in told:
                if isinstance(event, Delta) and event.scores:
                    values = [score.logprob for score in event.scores[0].named]
        logs = np.asarray(values, np.float64)
        chances = np.exp(logs - logs.max()) if request.apply_softmax else np.exp(logs)
        return float(chances[0] / chances.sum() if request.apply_softmax else chances[0])

    scores = await all_of(one(*numbered) for numbered in enumerate(prompts))
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    num = sum(len(ids) for ids in prompts)
    used = {
        "prompt_tokens": num,
        "total_tokens": num + len(prompts),
        "completion_tokens": len(prompts),
    }
    return json_response(listed(exchange, model, data, used, kind="score"))


async def _judged_prompts(exchange: Exchange, request: GenerativeScoringRequest) -> list[list[int]]:
    """Query and item one after the other; special tokens once, at the front."""
    services = exchange.services
    first_special = request.add_special_tokens

    async def ids_of(given: str | list[int], *, special: bool, field: str) -> list[int]:
        if isinstance(given, str):
            return await tokenized(exchange, given, field=field, special=special)
        services.tokenizer.check_ids(given, field=field)
        return given

    prompts = []
    for item in request.items:
        front, back = (item, request.query) if request.item_first else (request.query, item)
        ids = [
            *await ids_of(front, special=first_special, field="query"),
            *await ids_of(back, special=False, field="items"),
        ]
        most = services.text.max_model_len - 1
        prompts.append(shortened(ids, None, most=most, field="items"))
    return prompts
