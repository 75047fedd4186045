"""Liveness, readiness, start-up, version, load and metrics. None of them waits for the engine
longer than a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.errors import HeadraceError
from headrace.base.telemetry.vllm_names import vllm_text
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Ended, Generation
from headrace.front.server.conversation.context import RequestContext, Services, json_response

SCRAPE_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 20.0
LOWEST_PRIORITY = 2**31 - 1
State = tuple[str, bool]
"""The word for a state, and whether it is a good one. Found in any thread, without waiting."""
Reader = Callable[[RequestContext, Request], Awaitable[Response]]
SILENT_S = 10.0
"""A process whose loop gave no sign for so long is not alive."""


def liveness(services: Services) -> State:
    """Whether this process's loop turns; a failure here means: restart me."""
    return ("live", True) if services.loop.silent_s < SILENT_S else ("stuck", False)


def readiness(services: Services) -> State:
    """Whether requests are served: engine loaded, heartbeat fresh, not draining, neither paused
    nor asleep. One of several replicas is enough: the status says that it is degraded."""
    engine = services.engine
    if services.ready:
        fine = "degraded" if engine.degraded else "ready"
        return engine.held or fine, not engine.held
    loaded = services.warm and engine.ready
    why = "draining" if services.draining or services.leaving else "stuck" if loaded else "loading"
    return engine.trouble or why, False


def health(services: Services) -> State:
    """Whether the engine lives and makes progress: not while it is dead, stuck or not loaded
    yet. "stalled": nothing runs, as requests wait for what is not the engine's to give."""
    healthy = services.engine.ready and services.engine.alive
    fine = "stalled" if services.engine.stalled else "ok"
    return fine if healthy else "unavailable", healthy


def probing(state: Callable[[Services], State]) -> Reader:
    """The handler that answers with a state: 200 or 503, and the word for it."""

    async def get(context: RequestContext, request: Request) -> Response:
        return _answer_of(state, context.services)

    get.__doc__ = state.__doc__
    return get


PROBES: Mapping[str, Callable[[Services], State]] = {
    "/health/live": liveness,
    "/health/ready": readiness,
    "/health": health,
    "/ping": health,
}


def stand_in_probes(services: Services) -> dict[bytes, Callable[[], Response]]:
    """The probes for a thread that answers them while the loop is late (http/stand_in.py)."""
    return {path.encode(): partial(_answer_of, state, services) for path, state in PROBES.items()}


async def get_startup(context: RequestContext, request: Request) -> Response:
    """200 once the engine has been loaded; until then what is waited for, and for how long."""
    services = context.services
    connected, cores = services.engine.connected
    progress = {
        "phase": services.start_phase,
        "elapsed_s": round(time.monotonic() - services.started_at, 1),
        "engines_ready": connected,
        "engines": cores,
    }
    up = services.warm
    return _answer("started" if up else "loading", healthy=up, **progress)


def _answer_of(state: Callable[[Services], State], services: Services) -> Response:
    status, healthy = state(services)
    return _answer(status, healthy=healthy)


def _answer(status: str, *, healthy: bool, **facts: object) -> Response:
    response = json_response({"status": status, **facts}, status=200 if healthy else 503)
    if not healthy:
        response.headers["retry-after"] = "1"
    return response


async def get_generate(context: RequestContext, request: Request) -> Response:
    """The deep probe: one token through the whole engine, at the lowest priority; 503 when it does
    not come in time, and at once while the engines are paused or asleep. It needs a key where there
    are keys, and at most one runs at a time in a process: others get its answer."""
    services = context.services
    why = services.engine.held
    if not services.engine.connected[1]:
        why = "no model runs here"
    if why:
        return _answer(why, healthy=False)
    if services.probe is None or services.probe.done():
        services.probe = asyncio.ensure_future(_probe(services))
    came = await asyncio.shield(services.probe)
    return _answer("generated" if came else "stuck", healthy=came)


async def _probe(services: Services) -> bool:
    generation = Generation(
        prompt_ids=[0],
        params=SamplingParams(max_tokens=1, temperature=0.0),
        label="health",
        tenant="health",
        priority=LOWEST_PRIORITY if services.has_priorities else 0,
        deadline_s=PROBE_TIMEOUT_S,
    )
    try:
        async with (
            asyncio.timeout(PROBE_TIMEOUT_S),
            aclosing(services.engine.generate(generation)) as events,
        ):
            return any([isinstance(event, Ended) async for event in events])
    except (HeadraceError, TimeoutError):
        return False


async def get_version(context: RequestContext, request: Request) -> Response:
    """The version of headrace."""
    return json_response({"version": __version__})


async def get_load(context: RequestContext, request: Request) -> Response:
    """Generations in flight through this process."""
    return json_response({"server_load": context.services.shares.total})


async def get_metrics(context: RequestContext, request: Request) -> Response:
    """The Prometheus exposition; without the engine's own figures if it does not answer within a
    second."""
    statuses: list[object] = []
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            statuses = await context.services.engine.call_each("status")
    except (HeadraceError, TimeoutError):
        pass
    engines = [figures if isinstance(figures, Mapping) else {} for figures in statuses]
    services = context.services
    text = services.metrics.exposition(engines)
    if services.server.metrics_compat == "vllm":
        text += vllm_text(text.decode(), engines, services.text.model_names[0]).encode()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
