"""The handlers of the Anthropic routes: messages, count_tokens, and the list of models in its
shape."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.anthropic import stream
from headrace.front.server.anthropic.conversation import Unseal, to_conversation, to_request
from headrace.front.server.anthropic.failures import SHAPE
from headrace.front.server.anthropic.schema import CountTokensRequest, parse_messages, parse_prompt
from headrace.front.server.conversation.context import RequestContext, Services, json_response
from headrace.front.server.conversation.own_names import own_names, served_name
from headrace.front.server.conversation.pipeline import begin, prompt_ids, streamed
from headrace.front.server.conversation.rendering import rendered_translated
from headrace.front.server.conversation.resolved import (
    SentNames,
    TranslatedRequest,
    as_sent,
    prompt_source,
)
from headrace.front.server.http.auth import message_id
from headrace.front.server.http.paging import page_of_ids

THINKING = "thinking"


async def post_messages(context: RequestContext, document: Any) -> Response:
    """POST /v1/messages."""
    request = parse_messages(document)
    services = context.services
    conversation = to_conversation(
        request, services.served, id=message_id(), unseal=unsealing(context)
    )
    thinking = request.thinking
    show = thinking is None or thinking.display != "omitted"
    seal = services.sealer.sign if show else services.sealer.seal
    reply = stream.MessageReply(
        id=conversation.id,
        model=conversation.model,
        max_tokens=request.max_tokens,
        sign=lambda text: seal(text, owner=context.tenant, purpose=THINKING),
        show_thinking=show,
        managed=request.context_management is not None,
        cached_block_tokens=services.engine.cached_block_tokens,
    )
    try:
        _, events = await begin(context, conversation)
    except InvalidRequest as error:
        raise _about_roles(error, conversation.sent, conversation.prompt.messages) from None
    if request.stream:
        return await streamed(context, stream.to_chunks(events, reply), shape=SHAPE)
    return json_response(await stream.to_answer(events, reply))


async def post_count_tokens(context: RequestContext, document: Any) -> Response:
    """POST /v1/messages/count_tokens: the prompt's length; the engine is not asked."""
    request = parse_prompt(document)
    context.services.model_name(request.model)
    asked = translated(context, request)
    chat = asked.typed()
    try:
        with as_sent(asked):
            ids = await prompt_ids(context, prompt_source(chat))
    except InvalidRequest as error:
        raise _about_roles(error, asked, chat.messages) from None
    return json_response({"input_tokens": len(ids)})


async def post_render_messages(context: RequestContext, document: Any) -> Response:
    """POST /v1/messages/render."""
    request = parse_messages(document)
    asked = translated(context, request)
    return json_response(await rendered_translated(context, asked, streams=bool(request.stream)))


def translated(context: RequestContext, request: CountTokensRequest) -> TranslatedRequest:
    """The request as fields of a chat."""
    max_model_len = context.services.text.max_model_len
    return to_request(request, unseal=unsealing(context), max_model_len=max_model_len)


def unsealing(context: RequestContext) -> Unseal:
    """Opens thinking that was sealed for this key, or gives None."""

    def unseal(sealed: str) -> str | None:
        return context.services.sealer.open(sealed, owner=context.tenant, purpose=THINKING)

    return unseal


def _about_roles(
    error: InvalidRequest, sent: SentNames, messages: list[dict[str, Any]]
) -> InvalidRequest:
    """A template that refuses a system message inside the conversation is reported in the words
    that clients know: they fold the message into the user's turn and ask again."""
    inside = [
        place
        for place, message in zip(sent.places, messages, strict=True)
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
        "max_input_tokens": services.context_tokens,
        "max_tokens": services.context_tokens,
    }


async def get_models(context: RequestContext, request: Request) -> Response:
    """The names that are served, in pages: `limit`, and `after_id` or `before_id`."""
    services = context.services
    names = [*services.all_names, *(named.name for named in await own_names(context))]
    page, has_more = page_of_ids(request, names, of="model")
    return json_response(
        {
            "data": [_card(services, name) for name in page],
            "has_more": has_more,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    )


async def get_model(context: RequestContext, request: Request) -> Response:
    """One of them."""
    services, name = context.services, request.path_params["id"]
    if any(name == named.name for named in await own_names(context)):
        return json_response(_card(services, name))
    name = served_name(services, name) or name
    if services.models is not None:
        services.models.check(name)
    else:
        services.model_name(name)
    return json_response(_card(services, name))


async def get_hello(context: RequestContext, request: Request) -> Response:
    """What clients probe at their start (HEAD): that somebody is there."""
    return json_response({"message": "hello"})
