"""Administration on the API's own port, behind a key of its own, under the names that scripts for
vLLM use: pause, sleep, resets, profile. The admin API (admin_api.py) does the same on a port of its
own.

What is not built here (adapters, transfer of weights, elastic scaling) is refused by name: REFUSED
is that table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.errors import InvalidRequest, Unsupported
from headrace.front.server.administration import operations
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.request import parse

MODES = ("abort", "wait", "keep")


LEVELS = ("0", "1", "2")


MAX_IDS = 1024


Ids = Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(min_length=1, max_length=MAX_IDS)]


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests end: these public ids, or all."""

    request_ids: Ids | None = None
    all: bool = False


class CollectiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call to every engine core, by a name of `operations.CALLS`; it takes no arguments."""

    method: Annotated[str, Meta(max_length=200)]
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


async def post_pause(context: RequestContext, request: Request) -> Response:
    """Pauses every core; returns once the pause is complete (mode wait: once running requests have
    ended)."""
    mode = _one_of(request, "mode", MODES, default="abort")
    clear = _flag(request, "clear_cache", default=True)
    await operations.pause(context, mode, clear_cache=clear)
    return json_response({"status": "paused", "mode": mode})


async def post_resume(context: RequestContext, request: Request) -> Response:
    """Lets every core run again."""
    await operations.resume(context)
    return json_response({"status": "resumed"})


async def get_is_paused(context: RequestContext, request: Request) -> Response:
    """Whether the cores are paused."""
    return json_response({"is_paused": await operations.is_paused(context)})


async def post_sleep(context: RequestContext, request: Request) -> Response:
    """Pauses every core (level 0), and gives back the KV cache and the device's weights (1: they
    wait in host memory; 2: they are loaded again on waking). Mode keep: what runs is frozen, and
    goes on after waking from the tokens it has."""
    level = int(_one_of(request, "level", LEVELS, default="1"))
    mode = _one_of(request, "mode", MODES, default="abort")
    slept = await operations.sleep(context, level, mode)
    return json_response({"status": "sleeping", "level": slept})


async def post_wake_up(context: RequestContext, request: Request) -> Response:
    """Brings back or loads what sleeping gave back, and goes on. Parts named one by one (tags) come
    once all have been named."""
    tags = request.query_params.getlist("tags")
    awake = await operations.wake(context, tags)
    status = "awake" if awake else "sleeping"
    return json_response({"status": status, "tags": tags or list(operations.PARTS)})


async def get_is_sleeping(context: RequestContext, request: Request) -> Response:
    """Whether the cores are asleep."""
    return json_response({"is_sleeping": await operations.is_sleeping(context)})


async def get_server_info(context: RequestContext, request: Request) -> Response:
    """The version and the resolved configuration, without keys."""
    return json_response({"version": __version__, "config": context.services.config})


async def post_start_profile(context: RequestContext, request: Request) -> Response:
    """Traces the steps of every worker until it is stopped."""
    places = await operations.profile(context, start=True)
    return json_response({"status": "profiling", "places": places})


async def post_stop_profile(context: RequestContext, request: Request) -> Response:
    """Ends the trace and writes its files."""
    places = await operations.profile(context, start=False)
    return json_response({"status": "written", "places": places})


async def post_reset_media(context: RequestContext, request: Request) -> Response:
    """Nothing of media is cached, so that nothing is left to forget."""
    return json_response({"success": True})


async def post_reset_prefix_cache(context: RequestContext, request: Request) -> Response:
    """Forgets every cached prefix that no running request holds; with reset_running_requests what
    runs gives its KV back too, and is computed again. There is no external cache, so reset_external
    changes nothing."""
    running = _flag(request, "reset_running_requests", default=False)
    _flag(request, "reset_external", default=False)
    done = await operations.reset_prefix_cache(context, running=running)
    return json_response({"success": done})


async def post_abort(context: RequestContext, document: Any) -> Response:
    """Ends requests in flight, of whoever asked for them: those with these ids, or all."""
    body = parse(document, AbortRequest)
    if (body.request_ids is None) is not body.all:
        raise InvalidRequest("request_ids: give a list of ids, or all: true", field="request_ids")
    ended = await operations.abort(context, body.request_ids, tenant=None)
    return json_response({"status": "aborted", "aborted": ended})


async def post_abort_own(context: RequestContext, document: Any) -> Response:
    """POST /inference/v1/abort_requests: ends requests in flight of the key that asks."""
    body = parse(document, AbortRequest)
    if body.request_ids is None:
        raise InvalidRequest("request_ids: a list of ids is needed", field="request_ids")
    ended = await operations.abort(context, body.request_ids, tenant=context.tenant)
    return json_response({"status": "aborted", "aborted": ended})


async def post_collective_rpc(context: RequestContext, document: Any) -> Response:
    """Calls every engine core by a name from a closed list; no other code can be reached, and
    nothing is passed on."""
    body = parse(document, CollectiveRequest)
    if body.args or body.kwargs:
        field = "args" if body.args else "kwargs"
        raise InvalidRequest(f"{field}: these calls take no arguments", field=field)
    return json_response({"results": await operations.collective(context, body.method)})


async def get_world_size(context: RequestContext, request: Request) -> Response:
    """Workers of all engine cores."""
    return json_response({"world_size": operations.world_size(context)})


async def get_is_scaling(context: RequestContext, request: Request) -> Response:
    """Never: the number of replicas is fixed at start."""
    return json_response({"is_scaling_elastic_ep": False})


async def get_kv_event_sources(context: RequestContext, request: Request) -> Response:
    """None: this server publishes no events of its KV cache."""
    return json_response({"sources": []})


_NO_KV_RELEASE = "the KV cache cannot be given back alone; POST /sleep?level=1&mode=keep gives back weights and cache"


_NO_SCALING = "elastic scaling is not part of this server; start it anew with another --replicas"


_NO_FAULTS = "fault tolerance by hand is not part of this server; cores that die are restarted"


REFUSED: Mapping[str, str] = {
    "/v1/load_lora_adapter": operations.NO_LORA,
    "/v1/unload_lora_adapter": operations.NO_LORA,
    "/release_kv_cache": _NO_KV_RELEASE,
    "/release_kv_cache_memory": _NO_KV_RELEASE,
    **dict.fromkeys(
        (
            *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
            *("/finish_weight_update", "/update_weight_version", "/weight_info"),
            "/weight_checker",
        ),
        operations.NO_TRANSFER,
    ),
    "/scale_elastic_ep": _NO_SCALING,
    "/fault_tolerance/apply": _NO_FAULTS,
    "/fault_tolerance/status": _NO_FAULTS,
}
"""Routes of other servers for what is not built here, and the words they are refused with."""


def refusing(path: str) -> Callable[[RequestContext, Request], Awaitable[Response]]:
    """The handler of a row of REFUSED."""

    async def handler(context: RequestContext, request: Request) -> Response:
        raise Unsupported(f"{path.lstrip('/')}: {REFUSED[path]}")

    handler.__doc__ = f"Refused: {REFUSED[path]}."
    return handler


def _one_of(request: Request, name: str, allowed: tuple[str, ...], *, default: str) -> str:
    value = request.query_params.get(name, default)
    if value not in allowed:
        raise InvalidRequest(
            f"{name}: {value[:50]!r} given; allowed: {', '.join(allowed)}", field=name
        )
    return value


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: {value[:50]!r} given; allowed: true, false", field=name)
    return value.lower() in ("true", "1")
