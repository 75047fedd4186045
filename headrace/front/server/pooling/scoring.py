"""POST /score and /rerank: how well texts go together.

A model with a sequence-classification head of one label judges pairs (cross-encoder), a generative
one that was trained to judge says so in one word (judge.py), and one that reads lists compares all
documents of a query in one prompt (listwise.py). Any other embeds both sides and
compares the embeddings by cosine (bi-encoder), or their token vectors by MaxSim: where
`late_interaction` is asked for, and always where the checkpoint was made for it (late.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.pooling import PooledAnswer, finish_embedding, max_sim, probabilities
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pooling import (
    Counted,
    PoolInput,
    PoolJob,
    listed,
    pooled,
    shortened,
    tokenized,
    usage_of,
)
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.auth import completion_id
from headrace.front.server.pooling.content import (
    document_of,
    only_texts,
    pair_input_of,
    pool_input_of,
    sent_of,
    sent_side,
)
from headrace.front.server.pooling.judge import judged
from headrace.front.server.pooling.late import Sides
from headrace.front.server.pooling.listwise import ranked
from headrace.front.server.pooling.schema import (
    Parts,
    RerankRequest,
    ScoreRequest,
    ScoringInput,
    Sent,
)
from headrace.front.text.threads import TEXT_THREADS
from headrace.front.text.tokenizer import Tokenizer


async def post_score(context: RequestContext, document: Any) -> Response:
    """POST /score, /v1/score."""
    request = parse(document, ScoreRequest)
    model = context.services.base_name(request.model)
    first, queries = _side(context, request, ("text_1", "queries", "data_1"))
    second, documents = _side(context, request, ("text_2", "documents", "items", "data_2"))
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"{first}: {len(queries)} texts against {len(documents)} in {second}; 1:N or N:N "
            "is allowed",
            field=first,
        )
    scoring_input = ScoringInput(
        queries=queries,
        documents=documents,
        activate=request.use_activation is not False,
        late=request.late_interaction,
        truncate=request.truncate_prompt_tokens,
        instruction=request.instruction,
        timeout_s=request.timeout_s,
        fields=(first, second),
    )
    scores, answers = await _scored(context, scoring_input)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return json_response(listed(context, model, data, usage_of(answers), kind="score"))


async def post_rerank(context: RequestContext, document: Any) -> Response:
    """POST /rerank, /v1/rerank, /v2/rerank: the documents by falling relevance."""
    request = parse(document, RerankRequest)
    model = context.services.base_name(request.model)
    documents = sent_side(request.documents, "documents", context)
    scoring_input = ScoringInput(
        queries=[sent_of(request.query, "query", context)],
        documents=documents,
        activate=request.use_activation is not False,
        late=request.late_interaction,
        truncate=request.truncate_prompt_tokens,
        instruction=request.instruction,
        document_tokens=request.max_tokens_per_doc or None,
        timeout_s=request.timeout_s,
    )
    scores, answers = await _scored(context, scoring_input)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: request.top_n or None]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": document_of(documents[i])} if request.return_documents else {})
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


def _side(
    context: RequestContext, request: ScoreRequest, names: tuple[str, ...]
) -> tuple[str, list[Sent]]:
    """The contents of one side and the name they came under."""
    sent_names = [name for name in names if getattr(request, name) is not None]
    if len(sent_names) != 1:
        raise InvalidRequest(
            f"{names[0]}: exactly one of {', '.join(names)} is needed", field=names[0]
        )
    return sent_names[0], sent_side(getattr(request, sent_names[0]), sent_names[0], context)


async def _scored(
    context: RequestContext, scoring_input: ScoringInput
) -> tuple[list[float], Sequence[Counted]]:
    """One score per document, and what was pooled for them."""
    spec = context.services.text.pooling
    if scoring_input.instruction is not None and spec.judge is None and spec.listwise is None:
        raise InvalidRequest(
            "instruction: the model compares texts and follows none", field="instruction"
        )
    context.hold_place()
    if spec.listwise is not None:
        return await ranked(context, scoring_input)
    if spec.head == "sequence":
        if len(spec.labels) != 1:
            raise InvalidRequest(
                f"the model classifies into {len(spec.labels)} labels; scoring needs one label "
                "or embeddings",
                field="model",
            )
        return await _crossed(context, scoring_input)
    if spec.judge is not None:
        return await judged(context, scoring_input)
    return await _compared(context, scoring_input)


async def _crossed(
    context: RequestContext, scoring_input: ScoringInput
) -> tuple[list[float], list[PooledAnswer]]:
    services = context.services
    spec, most = services.text.pooling, services.text.max_model_len
    inputs = []
    queries = only_texts(scoring_input.paired_queries)
    for query, text in zip(queries, scoring_input.documents, strict=True):
        if isinstance(text, Parts):
            inputs.append(await pair_input_of(context, query, text))
            continue
        for side, field in zip((query, text), scoring_input.fields, strict=True):
            limit = most if scoring_input.truncate is None else None
            services.tokenizer.check_length(side, limit, field=field)
        cut = scoring_input.document_tokens
        encode = partial(_pair, services.tokenizer, spec.pair, query, text, second_tokens=cut)
        ids, second_at = await TEXT_THREADS.run(len(query) + len(text), encode)
        inputs.append(
            PoolInput(
                ids=shortened(
                    ids, scoring_input.truncate, most=most, field=scoring_input.fields[1]
                ),
                second_at=second_at,
            )
        )
    job = PoolJob(how=spec.how, head=True, timeout_s=scoring_input.timeout_s)
    answers = await pooled(context, inputs, job)
    activation = spec.activation if scoring_input.activate else "none"
    return [float(probabilities(a.values, activation)[0, 0]) for a in answers], answers


def _pair(
    tokenizer: Tokenizer,
    form: tuple[str, str] | None,
    query: str,
    document: str,
    *,
    second_tokens: int | None,
) -> tuple[list[int], int]:
    """The ids of a pair, of the document at most so many, and where its second text begins: see
    Tokenizer.encode_pair."""
    if form is None:
        return tokenizer.encode_pair(query, document, second_tokens=second_tokens)
    if second_tokens is not None:
        document = tokenizer.decode(tokenizer.encode_plain(document)[:second_tokens])
    before, between = form
    return tokenizer.encode(f"{before}{query}{between}{document}"), 0


async def _compared(
    context: RequestContext, scoring_input: ScoringInput
) -> tuple[list[float], list[PooledAnswer]]:
    spec = context.services.text.pooling
    tokens = scoring_input.late or spec.late is not None
    sides = Sides(context.services.tokenizer, spec.late)
    inputs = []
    for texts, field in zip(
        (scoring_input.queries, scoring_input.documents), scoring_input.fields, strict=True
    ):
        is_document = field == scoring_input.fields[1]
        truncate = sides.truncate(scoring_input.truncate, is_document=is_document)
        for text in texts:
            if isinstance(text, Parts):
                inputs.append(await pool_input_of(context, text))
                continue
            form = "" if is_document or spec.late is None else spec.late.query_form
            text = form.replace("{}", text) if form else text
            special = not form or (spec.late is not None and spec.late.adds_special)
            ids = await tokenized(context, text, field=field, truncate=truncate, special=special)
            if is_document and scoring_input.document_tokens is not None:
                ids = ids[: scoring_input.document_tokens]
            inputs.append(PoolInput(ids=sides.prepared(ids, is_document=is_document)))
    how = "tokens" if tokens else spec.how
    answers = await pooled(context, inputs, PoolJob(how=how, timeout_s=scoring_input.timeout_s))
    vectors = [
        finish_embedding(answer.values, dimensions=None, normalize=how != "lexical")
        for answer in answers
    ]
    for i in range(len(scoring_input.queries), len(vectors)):
        vectors[i] = vectors[i][sides.compared(inputs[i].ids)] if tokens else vectors[i]
    if tokens and spec.ends is not None:
        first = spec.ends[0]
        vectors = [one[int(i.ids[0] == first) :] for one, i in zip(vectors, inputs, strict=True)]
    queries, documents = (
        vectors[: len(scoring_input.queries)],
        vectors[len(scoring_input.queries) :],
    )
    pairs = zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True)
    if tokens:
        return [max_sim(query, text) for query, text in pairs], answers
    return [float(np.dot(query[0], text[0])) for query, text in pairs], answers
