"""Requests in flight: GET /v1/requests (the ledger of what is held), /v1/requests/{id} (where a
request is and why it waits), and the end of a client's own."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.administration import operations
from headrace.front.server.administration.parameters import (
    Ids,
    NoParameters,
    RequestsParameters,
)
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.auth import ADMIN_TENANT


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests end: those with these ids."""

    request_ids: Ids


async def get_request(context: RequestContext, request: Request) -> Response:
    """One request in flight, through whichever process it came: by its public id, by the
    x-request-id of its answer, or by the id that its client sent (its own requests only)."""
    asked = RequestsParameters(id=request.path_params["id"])
    return json_response(await operations.requests(context, asked))


async def get_slots(context: RequestContext, request: Request) -> Response:
    """The rows of every engine core as llama.cpp's server lists its slots: which of them run, and
    how far they are."""
    tenant = None if context.tenant == ADMIN_TENANT else context.tenant
    replies: list[Any] = await context.services.engine.call("slots", tenant=tenant)
    rows = [
        {**row, "model": reply.get("model", context.services.text.model_names[0])}
        for reply in replies
        for row in reply["slots"]
    ]
    return json_response([{**row, "id": number} for number, row in enumerate(rows)])


async def get_ledger(context: RequestContext, request: Request) -> Response:
    """What is held now: at rest all of it is back at the baseline."""
    return json_response(await operations.ledger(context, NoParameters()))


async def post_abort(context: RequestContext, document: Any) -> Response:
    """POST /inference/v1/abort_requests: ends requests in flight of the key that asks."""
    body = parse(document, AbortRequest)
    document = await operations.aborted(context, body.request_ids, tenant=context.tenant)
    return json_response(document)
