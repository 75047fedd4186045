"""Administration on the API's own port, behind a key of its own, under the names that scripts for vLLM use: pause,
sleep, resets, profile (ENG-15, contract 9). The administrative plane (plane.py) does the same on a port of its own.

The states live in the engine cores, so that they are the same through every API process.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.errors import InvalidRequest
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.native import plane

MODES = ("abort", "wait", "keep")
LEVELS = ("0", "1", "2")
PARTS = ("weights", "kv_cache")


async def post_pause(exchange: Exchange, request: Request) -> Response:
    """Pauses every core; returns once the pause is complete (mode wait: once running requests have ended)."""
    mode = _one_of(request, "mode", MODES, default="abort")
    clear = _flag(request, "clear_cache", default=True)
    await exchange.services.engine.call("pause", mode=mode, clear_cache=clear)
    return json_response({"status": "paused", "mode": mode})


async def post_resume(exchange: Exchange, request: Request) -> Response:
    """Lets every core run again."""
    await exchange.services.engine.call("resume")
    return json_response({"status": "resumed"})


async def get_is_paused(exchange: Exchange, request: Request) -> Response:
    """Whether the cores are paused."""
    replies = await exchange.services.engine.call("is_paused")
    found = [reply for reply in replies if isinstance(reply, dict)]
    return json_response({"is_paused": bool(found) and all(reply["paused"] for reply in found)})


async def post_sleep(exchange: Exchange, request: Request) -> Response:
    """Pauses every core (level 0), and gives all memory back (1 and 2 alike: weights are read again on waking)."""
    level = int(_one_of(request, "level", LEVELS, default="1"))
    modes = ("abort", "wait") if level else MODES  # what is frozen needs its KV cache
    mode = _one_of(request, "mode", modes, default="abort")
    engine = exchange.services.engine
    await engine.call("pause", mode=mode, clear_cache=level > 0)
    if level:
        await engine.call("sleep", level=level)
    return json_response({"status": "sleeping", "level": level})


async def post_wake_up(exchange: Exchange, request: Request) -> Response:
    """Loads what sleeping gave back and goes on; parts cannot be woken alone."""
    tags = request.query_params.getlist("tags")
    if tags and set(tags) != set(PARTS):
        raise InvalidRequest(
            f"tags: {', '.join(tags)[:50]!r} given; allowed: {' and '.join(PARTS)} together, or none",
            field="tags",
        )
    await plane.post_wake(exchange, None)
    return json_response({"status": "awake", "tags": list(PARTS)})


async def get_is_sleeping(exchange: Exchange, request: Request) -> Response:
    """Whether the cores are asleep."""
    replies = await exchange.services.engine.call("status")
    found = [reply for reply in replies if isinstance(reply, dict)]
    return json_response({"is_sleeping": bool(found) and all(reply["asleep"] for reply in found)})


async def get_server_info(exchange: Exchange, request: Request) -> Response:
    """The version and the resolved configuration, without keys."""
    return json_response({"version": __version__, "config": exchange.services.config})


async def post_start_profile(exchange: Exchange, request: Request) -> Response:
    """Traces the steps of every worker until it is stopped."""
    return await plane.post_profile(exchange, {"action": "start"})


async def post_stop_profile(exchange: Exchange, request: Request) -> Response:
    """Ends the trace and writes its files."""
    return await plane.post_profile(exchange, {"action": "stop"})


async def post_reset_media(exchange: Exchange, request: Request) -> Response:
    """Nothing of media is cached, so that nothing is left to forget."""
    return json_response({"success": True})


async def post_reset_prefix_cache(exchange: Exchange, request: Request) -> Response:
    """Forgets every cached prefix that no running request holds."""
    replies = await exchange.services.engine.call("reset_prefix_cache")
    return json_response(
        {"success": all(isinstance(reply, dict) and reply["reset"] for reply in replies)}
    )


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
