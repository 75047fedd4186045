"""Liveness, readiness, start-up, version, load and metrics. None of them waits for the engine longer than a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.errors import HeadraceError
from headrace.base.telemetry.vllm_names import vllm_text
from headrace.base.wire.params import SamplingParams
from headrace.front.client.events import Ended, Generation
from headrace.front.server.exchange import Exchange, Services, json_response

SCRAPE_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 20.0
LOWEST_PRIORITY = 2**31 - 1


async def get_live(exchange: Exchange, request: Request) -> Response:
    """This process's loop answers; a failure here means: restart me."""
    return json_response({"status": "live"})


async def get_ready(exchange: Exchange, request: Request) -> Response:
    """200 while requests are served: engine loaded, heartbeat fresh, not draining."""
    services = exchange.services
    if services.ready:
        return _answer("ready", healthy=True)
    loaded = services.warm and services.engine.ready
    why = "draining" if services.draining or services.leaving else "stuck" if loaded else "loading"
    why = services.engine.trouble or why
    return _answer(why, healthy=False)


async def get_startup(exchange: Exchange, request: Request) -> Response:
    """200 once the engine has been loaded."""
    up = exchange.services.warm
    return _answer("started" if up else "loading", healthy=up)


async def get_health(exchange: Exchange, request: Request) -> Response:
    """200 while the engine lives and makes progress; 503 when it is dead, stuck or not loaded yet."""
    engine = exchange.services.engine
    healthy = engine.ready and engine.alive
    return _answer("ok" if healthy else "unavailable", healthy=healthy)


def _answer(status: str, *, healthy: bool) -> Response:
    response = json_response({"status": status}, status=200 if healthy else 503)
    if not healthy:
        response.headers["retry-after"] = "1"
    return response


async def get_generate(exchange: Exchange, request: Request) -> Response:
    """The deep probe: one token through the whole engine, at the lowest priority; 503 when it does not come in time,
    and at once while the engines are paused or asleep. It needs a key where there are keys, and at most one runs at a
    time in a process: others get its answer."""
    services = exchange.services
    if (why := await _why_still(services)) is not None:
        return _answer(why, healthy=False)
    if services.probe is None or services.probe.done():
        services.probe = asyncio.ensure_future(_probe(services))
    came = await asyncio.shield(services.probe)
    return _answer("generated" if came else "stuck", healthy=came)


async def _why_still(services: Services) -> str | None:
    """Why no token is to be expected of healthy engines: an administrator wants it so, or there are none."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            found = await services.engine.call("status")
    except (HeadraceError, TimeoutError):
        return None
    if not found:
        return "no model runs here"
    states = ("asleep", "paused")
    return next(
        (why for why in states if all(isinstance(e, Mapping) and e[why] for e in found)), None
    )


async def _probe(services: Services) -> bool:
    generation = Generation(
        prompt_ids=[0],
        params=SamplingParams(max_tokens=1, temperature=0.0),
        label="health",
        tenant="health",
        priority=LOWEST_PRIORITY,
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


async def get_version(exchange: Exchange, request: Request) -> Response:
    """The version of headrace."""
    return json_response({"version": __version__})


async def get_load(exchange: Exchange, request: Request) -> Response:
    """Generations in flight through this process."""
    return json_response({"server_load": exchange.services.shares.total})


async def get_metrics(exchange: Exchange, request: Request) -> Response:
    """The Prometheus exposition; without the engine's own figures if it does not answer within a second."""
    found: list[object] = []
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            found = await exchange.services.engine.call("status")
    except (HeadraceError, TimeoutError):
        pass
    engines = [figures if isinstance(figures, Mapping) else {} for figures in found]
    services = exchange.services
    text = services.metrics.exposition(engines)
    if services.server.metrics_compat == "vllm":
        text += vllm_text(text.decode(), engines, services.text.model_names[0]).encode()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
