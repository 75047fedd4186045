"""The handlers of the Responses routes over HTTP."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import HeadraceError, InvalidRequest, NotFound
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import prompt_ids, streamed
from headrace.front.server.conversation.rendering import rendered_translated
from headrace.front.server.conversation.resolved import TranslatedRequest, as_sent, prompt_source
from headrace.front.server.http.auth import RESPONSE_PREFIX, response_id
from headrace.front.server.http.failures import CUT, OPENAI, ErrorFormat, Failure, failure_of
from headrace.front.server.http.paging import number_of, page_of
from headrace.front.server.http.sse import Chunks
from headrace.front.server.responses import background
from headrace.front.server.responses.conversation import to_request
from headrace.front.server.responses.items import with_ids
from headrace.front.server.responses.run import (
    Prepared,
    prepare,
    recall_from,
    run,
    store,
    translate,
)
from headrace.front.server.responses.schema import InputRequest, Json, parse_prompt, parse_response
from headrace.front.server.responses.stream import encoded, to_answer, to_chunks
from headrace.front.server.responses.tools import offered


async def post_responses(context: RequestContext, document: Any) -> Response:
    """POST /v1/responses."""
    request = parse_response(document)
    prepared = await prepare(context, request, document, recall=recall_from(context))
    if request.background:
        if not prepared.reply.stored:
            raise InvalidRequest("background: this server keeps no responses", field="background")
        await background.start(prepared)
        if request.stream:
            return await _followed(context, prepared.reply.id, after=-1)
        return json_response(prepared.stream.response)
    if request.stream:
        shape = ErrorFormat(
            body=context.services.errors.body,
            last_words=lambda f, _: _failed(prepared, f),
            cut=CUT_EVENT,
            ping=OPENAI.ping,
        )
        return await streamed(context, _chunks(prepared), shape=shape)
    return json_response(await to_answer(run(prepared), prepared.stream))


async def _chunks(prepared: Prepared) -> Chunks:
    """The stream. What fails after it began ends it with response.failed, which is stored too."""
    begun = False
    async with aclosing(to_chunks(run(prepared))) as chunks:
        try:
            async for chunk in chunks:
                begun = True
                yield chunk
        except HeadraceError as error:
            if not begun:
                raise
            last = _failed(prepared, failure_of(error, request_id=prepared.context.request_id))
            await store(prepared)
            yield last


def _failed(prepared: Prepared, failure: Failure) -> bytes:
    return b"".join(encoded(event) for event in prepared.stream.fail(failure))


async def _followed(context: RequestContext, ident: str, *, after: int) -> Response:
    follower = background.StreamFollower(context, ident, after)
    shape = ErrorFormat(
        body=context.services.errors.body,
        last_words=lambda failure, _: _error_event(failure, follower.after + 1),
        cut=CUT_EVENT,
        ping=OPENAI.ping,
    )
    return await streamed(context, follower.events(), shape=shape)


def _error_event(failure: Failure, number: int) -> bytes:
    event = {
        "type": "error",
        "code": failure.code,
        "message": failure.message,
        "param": failure.field,
        "sequence_number": number,
    }
    return encoded(event)


CUT_EVENT = _error_event(CUT, 2**31 - 1)
"""The process that counted the events is gone: this number is behind them all."""


async def get_response(context: RequestContext, request: Request) -> Response:
    """GET /v1/responses/{id}; with stream=true the events after `starting_after` of one made in the
    background."""
    ident = request.path_params["id"]
    record = await background.current(context, ident)
    document = orjson.loads(record.response)
    if request.query_params.get("stream", "false").lower() not in ("true", "1"):
        return json_response(document)
    if not document["background"]:
        raise InvalidRequest(
            "stream: only a response that was made with background: true can be streamed again",
            field="stream",
        )
    after = number_of(request, "starting_after", default=-1, least=0, most=2**31)
    return await _followed(context, ident, after=after)


async def delete_response(context: RequestContext, request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    ident = request.path_params["id"]
    kept = context.services.store if ident.startswith(RESPONSE_PREFIX) else None
    if kept is None or not await kept.delete(ident, context.tenant):
        raise NotFound(f"response {ident!r:.80} is not there (any more)", field="response_id")
    return json_response({"id": ident, "object": "response", "deleted": True})


async def post_cancel(context: RequestContext, request: Request) -> Response:
    """POST /v1/responses/{id}/cancel."""
    ident = request.path_params["id"]
    record = await background.current(context, ident)
    if not orjson.loads(record.response)["background"]:
        raise InvalidRequest(
            "only a response that was made with background: true can be cancelled; close the "
            "connection of others",
            field="response_id",
        )
    record = await background.cancel(context, ident)
    return json_response(orjson.loads(record.response))


async def get_input_items(context: RequestContext, request: Request) -> Response:
    """GET /v1/responses/{id}/input_items."""
    record = await background.current(context, request.path_params["id"])
    items: list[Json] = orjson.loads(record.input)
    return json_response(page_of(request, items))


async def post_input_tokens(context: RequestContext, document: Any) -> Response:
    """POST /v1/responses/input_tokens: the prompt's length; the engine is not asked."""
    request = parse_prompt(document)
    _, _, _, translated = await translate(
        context, request, document, ident=response_id(), recall=recall_from(context)
    )
    chat = translated.typed()
    with as_sent(translated):
        ids = await prompt_ids(context, prompt_source(chat))
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def post_render_responses(context: RequestContext, document: Any) -> Response:
    """POST /v1/responses/render."""
    request = parse_response(document)
    if request.previous_response_id is not None:
        raise InvalidRequest(
            "previous_response_id: rendering keeps no state; send the items themselves",
            field="previous_response_id",
        )
    _, _, _, translated = await translate(
        context, request, document, ident=response_id(), recall=_nothing_kept
    )
    streams = bool(request.stream)
    return json_response(await rendered_translated(context, translated, streams=streams))


async def _nothing_kept(ident: str, *, alone: bool = False) -> list[Json] | None:
    return None


def chat_of(context: RequestContext, items: str | list[Json]) -> TranslatedRequest:
    """An input of this dialect, a text or a list of items, as a conversation."""
    return to_request(
        InputRequest(input=items),
        {},
        tools=offered(None),
        history=[],
        own_items=with_ids(items, response_id()),
        unseal=lambda sealed: None,
        max_model_len=context.services.text.max_model_len,
    )
