"""POST /v2/embed: embeddings in Cohere's form."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pooling import (
    PoolInput,
    PoolJob,
    embeddings,
    one_vector,
    tokenized,
)
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.auth import completion_id
from headrace.front.server.pooling.content import pool_input_of, sent_side
from headrace.front.server.pooling.long_texts import longest_of, pooled_in_chunks
from headrace.front.server.pooling.schema import CohereEmbedRequest, Parts, PoolingContent, Sent
from headrace.front.server.pooling.vectors import cohere_forms


async def post_cohere_embed(context: RequestContext, document: Any) -> Response:
    """POST /v2/embed."""
    request = parse(document, CohereEmbedRequest)
    services = context.services
    services.base_name(request.model)
    one_vector(context)
    field, texts = _cohere_texts(context, request)
    context.hold_place()
    truncate = None if request.truncate == "NONE" else request.max_tokens or -1
    side = "left" if request.truncate == "START" else "right"
    longest = longest_of(context)
    inputs, warnings = [], list[str]()
    for text in texts:
        if isinstance(text, Parts):
            inputs.append(await pool_input_of(context, text))
            continue
        ids = await tokenized(
            context,
            text,
            field=field,
            truncate=truncate,
            side=side,
            longest=longest,
            warnings=warnings,
        )
        inputs.append(PoolInput(ids=ids))
    job = PoolJob(how=services.text.pooling.how, timeout_s=request.timeout_s)
    answers = await pooled_in_chunks(context, inputs, job)
    vectors = embeddings(context, answers, request.output_dimension, None)
    billed = {"input_tokens": sum(answer.num_prompt for answer in answers)}
    meta: dict[str, Any] = {"api_version": {"version": "2"}, "billed_units": billed}
    if warnings:
        meta["warnings"] = warnings
    return json_response(
        {
            "id": completion_id("embd"),
            "embeddings": cohere_forms(
                np.stack(vectors), list(request.embedding_types or ("float",))
            ),
            "texts": [text for text in texts if isinstance(text, str)],
            "meta": meta,
            "response_type": "embeddings_by_type",
        }
    )


def _cohere_texts(context: RequestContext, request: CohereEmbedRequest) -> tuple[str, list[Sent]]:
    """What is to be embedded, and the name it came under."""
    names = [n for n in ("texts", "inputs", "images") if getattr(request, n) is not None]
    if len(names) != 1:
        raise InvalidRequest(
            "texts: exactly one of texts, inputs and images is needed", field="texts"
        )
    if request.images is not None:
        images = [PoolingContent(image=image) for image in request.images]
        if context.services.media is None:
            raise InvalidRequest(
                "images: images are not accepted by this model (only text is)", field="images"
            )
        return names[0], sent_side([*images], names[0], context)
    return names[0], sent_side([*(request.texts or request.inputs or [])], names[0], context)
