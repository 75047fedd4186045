"""The handler of POST /v2/chat."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from headrace.front.server.cohere.conversation import to_conversation
from headrace.front.server.cohere.failures import SHAPE
from headrace.front.server.cohere.schema import parse_chat
from headrace.front.server.cohere.stream import CohereStream, to_answer, to_chunks
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import begin, streamed
from headrace.front.server.http.auth import completion_id


async def post_chat(context: RequestContext, document: Any) -> Response:
    """POST /v2/chat."""
    request = parse_chat(document)
    conversation = to_conversation(request, context.services.served, id=completion_id("chat"))
    stream = CohereStream(conversation.id, scores=conversation.fields.scores)
    _, events = await begin(context, conversation)
    if conversation.fields.streams:
        return await streamed(context, to_chunks(events, stream), shape=SHAPE)
    return json_response(await to_answer(events, stream))
