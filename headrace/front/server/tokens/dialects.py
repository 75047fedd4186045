"""POST /v1/messages/render and /v1/responses/render: what a request of these dialects becomes, as a generate request.

Nothing is kept and nothing is looked up: a request that refers to an earlier response has no prompt here.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.anthropic.routes import translated as from_messages
from headrace.front.server.anthropic.schema import parse_messages
from headrace.front.server.conversation import Translated, as_sent
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.ids import response_id
from headrace.front.server.responses.run import translate
from headrace.front.server.responses.schema import parse_response
from headrace.front.server.tokens.render import rendered_chat


async def post_render_messages(exchange: Exchange, document: Any) -> Response:
    """POST /v1/messages/render."""
    request = parse_messages(document)
    return await _rendered(exchange, from_messages(exchange, request), streams=bool(request.stream))


async def post_render_responses(exchange: Exchange, document: Any) -> Response:
    """POST /v1/responses/render."""
    request = parse_response(document)
    if request.previous_response_id is not None:
        raise InvalidRequest(
            "previous_response_id: rendering keeps no state; send the items themselves",
            field="previous_response_id",
        )
    _, _, found = await translate(
        exchange, request, document, ident=response_id(), recall=_nothing_kept
    )
    return await _rendered(exchange, found, streams=bool(request.stream))


async def _nothing_kept(ident: str, *, alone: bool = False) -> list[dict[str, Any]] | None:
    return None


async def _rendered(exchange: Exchange, found: Translated, *, streams: bool) -> Response:
    chat = found.typed()
    with as_sent(found):
        made = await rendered_chat(exchange, chat)
    return json_response({**made, "stream": streams})
