"""GET /v1/requests (the ledger of what is held) and /v1/requests/{id} (where a request is and why it waits)."""

from __future__ import annotations

import asyncio
import os
import threading

from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.exchange import Exchange, json_response


async def get_request(exchange: Exchange, request: Request) -> Response:
    """One request in flight, by its public id; the id is random, so knowing it is the permission to ask."""
    return json_response(await exchange.services.engine.explain(request.path_params["id"]))


async def get_ledger(exchange: Exchange, request: Request) -> Response:
    """What is held now: at rest all of it is back at the baseline (reliability 0)."""
    services = exchange.services
    engines = await services.engine.call("status")
    process = {
        "pid": os.getpid(),
        "generations": services.shares.total,
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
    }
    return json_response({"engines": engines, "process": process})
