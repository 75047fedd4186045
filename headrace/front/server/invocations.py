"""POST /invocations, the one route of SageMaker's containers: the body's own fields tell which
request it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest
from headrace.front.server.openai import chat, completions
from headrace.front.server.pooling import routes as pooling
from headrace.front.server.pooling import scoring
from headrace.front.server.pooling.schema import EmbeddingRequest, RerankRequest, ScoreRequest

Handler = Callable[[RequestContext, Any], Awaitable[Response]]
_BY_FIELD: dict[str, tuple[Handler, type[msgspec.Struct]]] = {
    "messages": (chat.post_chat, ChatRequest),
    "prompt": (completions.post_completions, CompletionRequest),
    "query": (scoring.post_rerank, RerankRequest),
    "text_1": (scoring.post_score, ScoreRequest),
    "input": (pooling.post_embeddings, EmbeddingRequest),
}
BODIES = tuple(body for _, body in _BY_FIELD.values())


async def post_invocations(context: RequestContext, document: Any) -> Response:
    """POST /invocations: a chat, a completion, a ranking, a score or embeddings."""
    fields = document if isinstance(document, dict) else {}
    for field, (handler, _) in _BY_FIELD.items():
        if field in fields:
            return await handler(context, document)
    raise InvalidRequest(
        f"none of {', '.join(_BY_FIELD)} is given: they tell what is asked for", field="messages"
    )
