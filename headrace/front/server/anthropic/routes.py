"""The handlers of the Anthropic routes: messages, count_tokens, and the list of models in its shape."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.anthropic import stream
from headrace.front.server.anthropic.conversation import to_request
from headrace.front.server.anthropic.failures import SHAPE
from headrace.front.server.anthropic.schema import CountTokensRequest, parse_messages, parse_prompt
from headrace.front.server.conversation import (
    Translated,
    as_sent,
    begin_translated,
    render,
    streamed,
)
from headrace.front.server.exchange import Exchange, Services, json_response
from headrace.front.server.ids import message_id
from headrace.front.server.responses.pages import number_of

THINKING = "thinking"
MAX_LISTED = 1000


async def post_messages(exchange: Exchange, document: Any) -> Response:
    """POST /v1/messages."""
    request = parse_messages(document)
    services = exchange.services
    asked = translated(exchange, request)
    chat = asked.typed()
    thinking = request.thinking
    show = thinking is None or thinking.display != "omitted"
    seal = services.sealer.sign if show else services.sealer.seal
    reply = stream.MessageReply(
        id=message_id(),
        model=services.model_name(request.model),
        max_tokens=request.max_tokens,
        sign=lambda text: seal(text, owner=exchange.tenant, purpose=THINKING),
        show_thinking=show,
        managed=request.context_management is not None,
    )
    try:
        events = await begin_translated(exchange, asked, chat, label=reply.id)
    except InvalidRequest as error:
        raise _about_roles(error, asked) from None
    if request.stream:
        return await streamed(exchange, stream.to_chunks(events, reply), shape=SHAPE)
    return json_response(await stream.to_message(events, reply))


async def post_count_tokens(exchange: Exchange, document: Any) -> Response:
    """POST /v1/messages/count_tokens: the prompt's length; the engine is not asked."""
    request = parse_prompt(document)
    exchange.services.model_name(request.model)
    asked = translated(exchange, request)
    chat = asked.typed()
    try:
        with as_sent(asked):
            ids = await render(exchange, chat)
    except InvalidRequest as error:
        raise _about_roles(error, asked) from None
    return json_response({"input_tokens": len(ids)})


def translated(exchange: Exchange, request: CountTokensRequest) -> Translated:
    """The request as the house's conversation."""
    services = exchange.services

    def unseal(sealed: str) -> str | None:
        return services.sealer.open(sealed, owner=exchange.tenant, purpose=THINKING)

    return to_request(request, unseal=unseal, max_model_len=services.text.max_model_len)


def _about_roles(error: InvalidRequest, asked: Translated) -> InvalidRequest:
    """A template that refuses a system message inside the conversation is reported in the words that clients know:
    they fold the message into the user's turn and ask again."""
    inside = [
        place
        for place, message in zip(asked.places, asked.document["messages"], strict=True)
        if message["role"] == "system" and place != "system"
    ]
    if not inside or "chat template" not in error.message:
        return error
    place = inside[0].replace("[", ".").replace("]", "")
    return InvalidRequest(
        f"{place}.role: Input should be 'user' or 'assistant' ({error.message})", field=inside[0]
    )


def _card(services: Services, name: str) -> dict[str, object]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(services.created))
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": services.text.max_model_len,
        "max_tokens": services.text.max_model_len,
    }


async def get_models(exchange: Exchange, request: Request) -> Response:
    """The names that are served, in pages: `limit`, and `after_id` or `before_id`."""
    services = exchange.services
    page, has_more = _page(request, list(services.text.model_names))
    return json_response(
        {
            "data": [_card(services, name) for name in page],
            "has_more": has_more,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    )


def _page(request: Request, names: list[str]) -> tuple[list[str], bool]:
    """The page that the query asks for, and whether there is more in its direction."""
    limit = number_of(request, "limit", default=20, least=1, most=MAX_LISTED)
    after, before = (request.query_params.get(name) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        raise InvalidRequest(
            "before_id: does not go with after_id; send one of them", field="before_id"
        )
    for field, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in names:
            raise InvalidRequest(f"{field}: no model {given[:80]!r} is served", field=field)
    if before is not None:
        rest = names[: names.index(before)]
        return rest[-limit:], len(rest) > limit
    rest = names if after is None else names[names.index(after) + 1 :]
    return rest[:limit], len(rest) > limit


async def get_model(exchange: Exchange, request: Request) -> Response:
    """One of them."""
    services = exchange.services
    return json_response(_card(services, services.model_name(request.path_params["id"])))


async def get_hello(exchange: Exchange, request: Request) -> Response:
    """What clients probe at their start (HEAD): that somebody is there."""
    return json_response({"message": "hello"})
