"""POST /pooling with `data`: what a package makes prompts of, and of whose vectors it makes the
answer (front/client/io_processor.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import orjson
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.client.pooling import finish_embedding, probabilities
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.pooling import (
    MAX_TEXTS,
    PoolInput,
    PoolJob,
    pooled,
    tokenized,
    usage_of,
)
from headrace.front.server.conversation.request import parse
from headrace.front.server.pooling.schema import PoolingCommon


class DataRequest(PoolingCommon, frozen=True, kw_only=True):
    """`task`: what vLLM's clients say."""

    data: Any
    task: Literal["plugin"] | None = None


async def post_data(context: RequestContext, document: Any) -> Response:
    """The answer of the server's IO processor."""
    request = parse(document, DataRequest)
    services = context.services
    services.base_name(request.model)
    processor = services.io_processor
    if processor is None:
        raise InvalidRequest("data: this server has no --io-processor", field="data")
    context.hold_place()
    prompts = await asyncio.to_thread(_asked, processor.prompts, request.data)
    if not isinstance(prompts, list | tuple) or not 1 <= len(prompts) <= MAX_TEXTS:
        raise InvalidRequest(
            f"data: its IO processor gives no list of 1 to {MAX_TEXTS} prompts", field="data"
        )
    inputs = [await _input(context, one) for one in prompts]
    spec = services.text.pooling
    job = PoolJob(
        how=spec.how,
        head=bool(spec.labels),
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
    )
    answers = await pooled(context, inputs, job)
    rows = [
        probabilities(one.values, spec.activation)
        if spec.labels
        else finish_embedding(one.values, dimensions=None, normalize=spec.normalize)
        for one in answers
    ]
    vectors = [row if spec.how == "tokens" else row[0] for row in rows]
    said = await asyncio.to_thread(_asked, processor.answer, request.data, vectors)
    body = {
        "request_id": context.request_id,
        "created_at": int(time.time()),
        "data": said,
        "usage": usage_of(answers),
    }
    try:
        return Response(
            orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json"
        )
    except TypeError as error:
        raise InvalidRequest(
            f"data: its IO processor gives no JSON ({error!s:.200})", field="data"
        ) from None


def _asked(ask: Callable[..., Any], *arguments: Any) -> Any:
    """What a package raises is an error of the request."""
    try:
        return ask(*arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {error!s:.500}"
        raise InvalidRequest(
            f"data: refused by the server's IO processor ({reason})", field="data"
        ) from None


async def _input(context: RequestContext, prompt: Any) -> PoolInput:
    if isinstance(prompt, str):
        return PoolInput(
            ids=await tokenized(context, prompt, field="data", special=True, truncate=None)
        )
    if not isinstance(prompt, list | tuple) or not prompt:
        raise InvalidRequest(
            f"data: its IO processor gives {prompt!r:.80} as a prompt; a text or token ids are wanted",
            field="data",
        )
    context.services.tokenizer.check_ids(list(prompt), field="data")
    return PoolInput(ids=list(prompt))
