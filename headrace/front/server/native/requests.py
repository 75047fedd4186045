"""GET /v1/requests (the ledger of what is held) and /v1/requests/{id} (where a request is and why
it waits)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.administration import operations
from headrace.front.server.conversation.context import RequestContext, json_response


async def get_request(context: RequestContext, request: Request) -> Response:
    """One request in flight, through whichever process it came: by its public id, by the
    x-request-id of its answer, or by the id that its client sent (its own requests only)."""
    return json_response(await operations.explain(context, request.path_params["id"]))


async def get_ledger(context: RequestContext, request: Request) -> Response:
    """What is held now: at rest all of it is back at the baseline."""
    return json_response(await operations.ledger(context))
