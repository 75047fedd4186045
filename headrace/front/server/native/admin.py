"""The administrative plane, behind a key of its own: pause, resume, is_paused, reset_prefix_cache (ENG-15).

The pause state lives in the engine cores, so that it is the same through every API process.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.exchange import Exchange, json_response

MODES = ("abort", "wait", "keep")


async def post_pause(exchange: Exchange, request: Request) -> Response:
    """Pauses every core; returns once the pause is complete (mode wait: once running requests have ended)."""
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise InvalidRequest(
            f"mode: {mode[:50]!r} given; allowed: {', '.join(MODES)}", field="mode"
        )
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


async def post_reset_prefix_cache(exchange: Exchange, request: Request) -> Response:
    """Forgets every cached prefix that no running request holds."""
    replies = await exchange.services.engine.call("reset_prefix_cache")
    return json_response(
        {"success": all(isinstance(reply, dict) and reply["reset"] for reply in replies)}
    )


def _flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name)
    if given is None:
        return default
    if given.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: {given[:50]!r} given; allowed: true, false", field=name)
    return given.lower() in ("true", "1")
