"""POST /invocations, the one route of SageMaker's containers: the kind of the model and the body's
own fields tell which request it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest
from headrace.front.server.openai import chat, completions
from headrace.front.server.pooling import routes as pooling
from headrace.front.server.pooling import scoring
from headrace.front.server.pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)

Handler = Callable[[RequestContext, Any], Awaitable[Response]]
_Kind = tuple[Handler, type[msgspec.Struct]]
_SCORING: dict[str, _Kind] = {
    "query": (scoring.post_rerank, RerankRequest),
    "text_1": (scoring.post_score, ScoreRequest),
    "queries": (scoring.post_score, ScoreRequest),
    "data_1": (scoring.post_score, ScoreRequest),
}
_EMBEDS: _Kind = (pooling.post_embeddings, EmbeddingRequest)
_CLASSIFIES: _Kind = (pooling.post_classify, ClassifyRequest)
_BY_FIELD: dict[str, dict[str, _Kind]] = {
    "generates": {
        "messages": (chat.post_chat, ChatRequest),
        "prompt": (completions.post_completions, CompletionRequest),
        **_SCORING,
        "input": _EMBEDS,
    },
    "embeds": {"messages": _EMBEDS, **_SCORING, "input": _EMBEDS},
    "classifies": {"messages": _CLASSIFIES, **_SCORING, "input": _CLASSIFIES},
}
"""What a field asks for, by the kind of the model."""
BODIES = tuple(dict.fromkeys(body for kinds in _BY_FIELD.values() for _, body in kinds.values()))


async def post_invocations(context: RequestContext, document: Any) -> Response:
    """POST /invocations: a chat, a completion, a ranking, a score, classes or embeddings, by the
    model's kind and the body's fields."""
    fields = document if isinstance(document, dict) else {}
    kinds = _BY_FIELD[_kind(context.services.text)]
    for field, (handler, _) in kinds.items():
        if field in fields:
            return await handler(context, document)
    raise InvalidRequest(
        f"none of {', '.join(kinds)} is given: they tell what is asked for", field=next(iter(kinds))
    )


def _kind(text: TextSpec) -> str:
    if text.generates:
        return "generates"
    return "embeds" if text.pooling.head == "none" else "classifies"
