"""POST /score and /rerank: how well texts go together.

A model with a sequence-classification head of one label judges pairs (cross-encoder), a generative one that was trained
to judge says so in one word (judge.py). Any other embeds both sides and compares the embeddings by cosine (bi-encoder),
or their token vectors by MaxSim: where `late_interaction` is asked for, and always where the checkpoint was made for it
(late.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.pooling import (
    PooledAnswer,
    finish_embedding,
    max_sim,
    probabilities,
)
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.ids import completion_id
from headrace.front.server.openai.schema import parse
from headrace.front.server.pooling.content import text_of, texts_of
from headrace.front.server.pooling.engine import (
    PoolInput,
    PoolJob,
    listed,
    pooled,
    shortened,
    tokenized,
    usage_of,
)
from headrace.front.server.pooling.judge import judged
from headrace.front.server.pooling.late import Sides
from headrace.front.server.pooling.schema import RerankRequest, ScoreRequest
from headrace.front.server.pooling.wish import Counted, Wish


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
    wish = Wish(
        queries=queries,
        documents=documents,
        activate=request.use_activation is not False,
        late=request.late_interaction,
        truncate=request.truncate_prompt_tokens,
        instruction=request.instruction,
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
    texts = texts_of(request.documents, "documents")
    wish = Wish(
        queries=[text_of(request.query, "query")],
        documents=texts,
        activate=request.use_activation is not False,
        late=request.late_interaction,
        truncate=request.truncate_prompt_tokens,
        instruction=request.instruction,
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
    return given[0], texts_of(getattr(request, given[0]), given[0])


async def _scored(exchange: Exchange, wish: Wish) -> tuple[list[float], Sequence[Counted]]:
    """One score per document, and what was pooled for them."""
    spec = exchange.services.text.pooling
    if wish.instruction is not None and spec.judge is None:
        raise InvalidRequest(
            "instruction: the model compares texts and follows none", field="instruction"
        )
    exchange.hold_place()
    if spec.head == "sequence":
        if len(spec.labels) != 1:
            raise InvalidRequest(
                f"the model classifies into {len(spec.labels)} labels; scoring needs one label or embeddings",
                field="model",
            )
        return await _crossed(exchange, wish)
    if spec.judge is not None:
        return await judged(exchange, wish)
    return await _compared(exchange, wish)


async def _crossed(exchange: Exchange, wish: Wish) -> tuple[list[float], list[PooledAnswer]]:
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


async def _compared(exchange: Exchange, wish: Wish) -> tuple[list[float], list[PooledAnswer]]:
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
