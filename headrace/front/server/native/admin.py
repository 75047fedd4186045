"""Administration on the API's own port, behind a key of its own, under the names that scripts for vLLM use: pause,
sleep, resets, profile (ENG-15, contract 9). The administrative plane (plane.py) does the same on a port of its own.

What is not built here (adapters, transfer of weights, elastic scaling) is refused by name: REFUSED is that table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.errors import InvalidRequest, Unsupported
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.native import operations
from headrace.front.server.openai.schema import parse

MODES = ("abort", "wait", "keep")
LEVELS = ("0", "1", "2")
MAX_IDS = 1024
Ids = Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(min_length=1, max_length=MAX_IDS)]


class AbortWish(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests end: these public ids, or all."""

    request_ids: Ids | None = None
    all: bool = False


class CollectiveWish(msgspec.Struct, frozen=True, kw_only=True):
    """A call to every engine core, by a name of `operations.CALLS`; it takes no arguments."""

    method: Annotated[str, Meta(max_length=200)]
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


async def post_pause(exchange: Exchange, request: Request) -> Response:
    """Pauses every core; returns once the pause is complete (mode wait: once running requests have ended)."""
    mode = _one_of(request, "mode", MODES, default="abort")
    clear = _flag(request, "clear_cache", default=True)
    await operations.pause(exchange, mode, clear_cache=clear)
    return json_response({"status": "paused", "mode": mode})


async def post_resume(exchange: Exchange, request: Request) -> Response:
    """Lets every core run again."""
    await operations.resume(exchange)
    return json_response({"status": "resumed"})


async def get_is_paused(exchange: Exchange, request: Request) -> Response:
    """Whether the cores are paused."""
    return json_response({"is_paused": await operations.is_paused(exchange)})


async def post_sleep(exchange: Exchange, request: Request) -> Response:
    """Pauses every core (level 0), and gives back the KV cache and the device's weights (1: they wait in host memory;
    2: they are loaded again on waking). Mode keep: what runs is frozen, and goes on after waking from the tokens it
    has."""
    level = int(_one_of(request, "level", LEVELS, default="1"))
    mode = _one_of(request, "mode", MODES, default="abort")
    slept = await operations.sleep(exchange, level, mode)
    return json_response({"status": "sleeping", "level": slept})


async def post_wake_up(exchange: Exchange, request: Request) -> Response:
    """Brings back or loads what sleeping gave back, and goes on. Parts named one by one (tags) come once all have been
    named."""
    tags = request.query_params.getlist("tags")
    awake = await operations.wake(exchange, tags)
    status = "awake" if awake else "sleeping"
    return json_response({"status": status, "tags": tags or list(operations.PARTS)})


async def get_is_sleeping(exchange: Exchange, request: Request) -> Response:
    """Whether the cores are asleep."""
    return json_response({"is_sleeping": await operations.is_sleeping(exchange)})


async def get_server_info(exchange: Exchange, request: Request) -> Response:
    """The version and the resolved configuration, without keys."""
    return json_response({"version": __version__, "config": exchange.services.config})


async def post_start_profile(exchange: Exchange, request: Request) -> Response:
    """Traces the steps of every worker until it is stopped."""
    places = await operations.profile(exchange, start=True)
    return json_response({"status": "profiling", "places": places})


async def post_stop_profile(exchange: Exchange, request: Request) -> Response:
    """Ends the trace and writes its files."""
    places = await operations.profile(exchange, start=False)
    return json_response({"status": "written", "places": places})


async def post_reset_media(exchange: Exchange, request: Request) -> Response:
    """Nothing of media is cached, so that nothing is left to forget."""
    return json_response({"success": True})


async def post_reset_prefix_cache(exchange: Exchange, request: Request) -> Response:
    """Forgets every cached prefix that no running request holds; with reset_running_requests what runs gives its KV
    back too, and is computed again. There is no external cache, so reset_external changes nothing."""
    running = _flag(request, "reset_running_requests", default=False)
    _flag(request, "reset_external", default=False)
    done = await operations.reset_prefix_cache(exchange, running=running)
    return json_response({"success": done})


async def post_abort(exchange: Exchange, document: Any) -> Response:
    """Ends requests in flight, of whoever asked for them: those with these ids, or all."""
    wish = parse(document, AbortWish)
    if (wish.request_ids is None) is not wish.all:
        raise InvalidRequest("request_ids: give a list of ids, or all: true", field="request_ids")
    ended = await operations.abort(exchange, wish.request_ids, tenant=None)
    return json_response({"status": "aborted", "aborted": ended})


async def post_abort_own(exchange: Exchange, document: Any) -> Response:
    """POST /inference/v1/abort_requests: ends requests in flight of the key that asks."""
    wish = parse(document, AbortWish)
    if wish.request_ids is None:
        raise InvalidRequest("request_ids: a list of ids is needed", field="request_ids")
    ended = await operations.abort(exchange, wish.request_ids, tenant=exchange.tenant)
    return json_response({"status": "aborted", "aborted": ended})


async def post_collective_rpc(exchange: Exchange, document: Any) -> Response:
    """Calls every engine core by a name from a closed list; no other code can be reached, and nothing is passed on."""
    wish = parse(document, CollectiveWish)
    if wish.args or wish.kwargs:
        field = "args" if wish.args else "kwargs"
        raise InvalidRequest(f"{field}: these calls take no arguments", field=field)
    return json_response({"results": await operations.collective(exchange, wish.method)})


async def get_world_size(exchange: Exchange, request: Request) -> Response:
    """Workers of all engine cores."""
    return json_response({"world_size": operations.world_size(exchange)})


async def get_is_scaling(exchange: Exchange, request: Request) -> Response:
    """Never: the number of replicas is fixed at start."""
    return json_response({"is_scaling_elastic_ep": False})


async def get_kv_event_sources(exchange: Exchange, request: Request) -> Response:
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


def refusing(path: str) -> Callable[[Exchange, Request], Awaitable[Response]]:
    """The handler of a row of REFUSED."""

    async def handler(exchange: Exchange, request: Request) -> Response:
        raise Unsupported(f"{path.lstrip('/')}: {REFUSED[path]}")

    handler.__doc__ = f"Refused: {REFUSED[path]}."
    return handler


def _one_of(request: Request, name: str, allowed: tuple[str, ...], *, default: str) -> str:
    given = request.query_params.get(name, default)
    if given not in allowed:
        raise InvalidRequest(
            f"{name}: {given[:50]!r} given; allowed: {', '.join(allowed)}", field=name
        )
    return given


def _flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name)
    if given is None:
        return default
    if given.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: {given[:50]!r} given; allowed: true, false", field=name)
    return given.lower() in ("true", "1")
