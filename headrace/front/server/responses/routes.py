"""The handlers of the Responses routes over HTTP."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import HeadraceError, InvalidRequest, NotFound
from headrace.front.server.conversation import as_sent, render, streamed
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.failures import OPENAI, Failure, Shape, failure_of
from headrace.front.server.ids import RESPONSE_PREFIX, response_id
from headrace.front.server.responses import background
from headrace.front.server.responses.pages import number_of, page_of
from headrace.front.server.responses.run import (
    Prepared,
    prepare,
    recall_from,
    run,
    store,
    translate,
)
from headrace.front.server.responses.schema import Json, parse_prompt, parse_response
from headrace.front.server.responses.stream import encoded
from headrace.front.server.sse import Chunks


async def post_responses(exchange: Exchange, document: Any) -> Response:
    """POST /v1/responses."""
    request = parse_response(document)
    prepared = await prepare(exchange, request, document, recall=recall_from(exchange))
    if request.background:
        if not prepared.reply.stored:
            raise InvalidRequest("background: this server keeps no responses", field="background")
        await background.start(prepared)
        if request.stream:
            return await _followed(exchange, prepared.reply.id, after=-1)
        return json_response(prepared.stream.response)
    if request.stream:
        shape = Shape(
            body=OPENAI.body, last_words=lambda f, _: _failed(prepared, f), ping=OPENAI.ping
        )
        return await streamed(exchange, _chunks(prepared), shape=shape)
    async with aclosing(run(prepared)) as events:
        async for _ in events:
            pass
    return json_response(prepared.stream.response)


async def _chunks(prepared: Prepared) -> Chunks:
    """The stream. What fails after it began ends it with response.failed, which is stored too."""
    begun = False
    async with aclosing(run(prepared)) as events:
        try:
            async for event in events:
                begun = True
                yield encoded(event)
        except HeadraceError as error:
            if not begun:
                raise
            last = _failed(prepared, failure_of(error, request_id=prepared.exchange.request_id))
            await store(prepared)
            yield last


def _failed(prepared: Prepared, failure: Failure) -> bytes:
    return b"".join(encoded(event) for event in prepared.stream.fail(failure))


async def _followed(exchange: Exchange, ident: str, *, after: int) -> Response:
    follower = background.Follower(exchange, ident, after)
    shape = Shape(
        body=OPENAI.body,
        last_words=lambda failure, _: _error_event(failure, follower.after + 1),
        ping=OPENAI.ping,
    )
    return await streamed(exchange, follower.events(), shape=shape)


def _error_event(failure: Failure, number: int) -> bytes:
    event = {
        "type": "error",
        "code": failure.code,
        "message": failure.message,
        "param": failure.field,
        "sequence_number": number,
    }
    return encoded(event)


async def get_response(exchange: Exchange, request: Request) -> Response:
    """GET /v1/responses/{id}; with stream=true the events after `starting_after` of one made in the background."""
    ident = request.path_params["id"]
    record = await background.current(exchange, ident)
    document = orjson.loads(record.response)
    if request.query_params.get("stream", "false").lower() not in ("true", "1"):
        return json_response(document)
    if not document["background"]:
        raise InvalidRequest(
            "stream: only a response that was made with background: true can be streamed again",
            field="stream",
        )
    after = number_of(request, "starting_after", default=-1, least=0, most=2**31)
    return await _followed(exchange, ident, after=after)


async def delete_response(exchange: Exchange, request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    ident = request.path_params["id"]
    kept = exchange.services.store if ident.startswith(RESPONSE_PREFIX) else None
    if kept is None or not await kept.delete(ident, exchange.tenant):
        raise NotFound(f"response {ident!r:.80} is not there (any more)", field="response_id")
    return json_response({"id": ident, "object": "response", "deleted": True})


async def post_cancel(exchange: Exchange, request: Request) -> Response:
    """POST /v1/responses/{id}/cancel."""
    ident = request.path_params["id"]
    record = await background.current(exchange, ident)
    if not orjson.loads(record.response)["background"]:
        raise InvalidRequest(
            "only a response that was made with background: true can be cancelled; close the connection of others",
            field="response_id",
        )
    record = await background.cancel(exchange, ident)
    return json_response(orjson.loads(record.response))


async def get_input_items(exchange: Exchange, request: Request) -> Response:
    """GET /v1/responses/{id}/input_items."""
    record = await background.current(exchange, request.path_params["id"])
    items: list[Json] = orjson.loads(record.input)
    return json_response(page_of(request, items))


async def post_input_tokens(exchange: Exchange, document: Any) -> Response:
    """POST /v1/responses/input_tokens: the prompt's length; the engine is not asked."""
    request = parse_prompt(document)
    _, _, translated = await translate(
        exchange, request, document, ident=response_id(), recall=recall_from(exchange)
    )
    chat = translated.typed()
    with as_sent(translated):
        ids = await render(exchange, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})
