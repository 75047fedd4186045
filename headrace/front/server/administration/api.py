"""The admin API on a listener of its own: /v1/admin/. Off unless `--admin-listen` names a place.

Behind the admin key, if there is one; without one the listener is a Unix socket or loopback, and
only loopback names are answered. Nothing of the API is served here, and nothing here is served
there. Read-only mode refuses every POST."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace import __version__
from headrace.base.errors import Forbidden, HeadraceError
from headrace.front.server.administration import operations
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.auth import (
    ADMIN_TENANT,
    check_host,
    digest_matches,
    presented_digest,
)

log = logging.getLogger(__name__)


PREFIX = "/v1/admin"


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`mode`: abort ends what runs, wait lets it finish, keep freezes it."""

    mode: Literal["abort", "wait", "keep"] = "wait"
    clear_cache: bool = True


class ReloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or GGUF file with weights of the same architecture; none: the present ones, read
    again."""

    model: Annotated[str, Meta(max_length=4096)] = ""
    mode: Literal["abort", "wait"] = "wait"


class SleepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Both levels give everything back; weights are read again on waking."""

    level: Literal[1, 2] = 1


class LogLevelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The level of every process's log."""

    level: Literal["debug", "info", "warning", "error"]


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Begins a trace of the workers' steps, or ends it and writes the files."""

    action: Literal["start", "stop"]


class AdminAuthenticator:
    """Decides who may ask here."""

    def __init__(self, admin_key_digest: str | None, *, readonly: bool) -> None:
        self._digest = admin_key_digest
        self._readonly = readonly

    def tenant(self, scope: Scope) -> str:
        """ "admin"; Unauthorized without the key, Forbidden for a change in read-only mode."""
        if self._digest is None:
            check_host(scope)
        else:
            digest_matches(presented_digest(scope), self._digest)
        if self._readonly and scope["method"] not in ("GET", "HEAD"):
            raise Forbidden("the admin API is read-only here (--admin-readonly)")
        return ADMIN_TENANT


async def get_health(context: RequestContext, request: Request) -> Response:
    """Whether the engine runs, is paused, or asleep; 503 when it is dead."""
    services = context.services
    alive = services.engine.ready and services.engine.alive
    replies = await services.engine.call_each("status") if alive else []
    engines = [reply for reply in replies if isinstance(reply, dict)]
    document = {
        "status": "ok" if alive else "unavailable",
        "version": __version__,
        "is_running": alive,
        "is_paused": any(engine["paused"] for engine in engines),
        "is_asleep": bool(engines) and all(engine["asleep"] for engine in engines),
        "sleep_level": max((engine["sleep_level"] for engine in engines), default=0),
        "trouble": services.engine.trouble or None,
        "is_draining": services.draining,
    }
    return json_response(document, status=200 if alive else 503)


async def get_models(context: RequestContext, request: Request) -> Response:
    """The names that are served, and what is behind them."""
    services = context.services
    engine = services.config.get("engine")
    model = engine["model"] if isinstance(engine, dict) else {}
    wanted = ("path", "family", "format", "dtype", "quantization", "max_model_len")
    facts = {name: model.get(name) for name in wanted}
    return json_response({"models": [{"id": name, **facts} for name in services.text.model_names]})


async def get_config(context: RequestContext, request: Request) -> Response:
    """The resolved configuration, without keys, and every decision that was made for the user."""
    config = context.services.config
    engine: Any = config.get("engine") or {"model": {}, "device": {}}
    model, device = engine["model"], engine["device"]
    short = {
        "model": context.services.text.model_names[0],
        "dtype": model.get("dtype"),
        "max_model_len": context.services.text.max_model_len,
        "tp": device.get("tensor_parallel", 1),
        "dp": config.get("replicas", 1),
    }
    return json_response({**short, "pp": 1, "ep": 1, **config})


async def get_queue(context: RequestContext, request: Request) -> Response:
    """Who runs, who waits, and why."""
    engines: list[Any] = await context.services.engine.call("status")
    wanted = (
        *("running", "waiting", "waiting_tokens", "waiting_by_reason", "waiting_by_tenant"),
        *("free_rows", "total_rows", "free_blocks", "total_blocks", "tokens_per_s"),
    )
    queues = [{name: engine[name] for name in wanted} for engine in engines]
    load = context.services.shares.total
    return json_response({"server_load": load, "load_tracking_enabled": True, "engines": queues})


async def get_ledger(context: RequestContext, request: Request) -> Response:
    """Everything that could leak, in numbers; at rest all of it is back where it was."""
    return json_response(await operations.ledger(context))


async def post_pause(context: RequestContext, document: Any) -> Response:
    """Pauses every core; answers once the pause is complete."""
    body = parse(document, PauseRequest)
    await operations.pause(context, body.mode, clear_cache=body.clear_cache)
    return json_response({"status": "paused", "mode": body.mode})


async def post_resume(context: RequestContext, document: Any) -> Response:
    """Lets every core run again."""
    await operations.resume(context)
    return json_response({"status": "resumed"})


async def post_reload(context: RequestContext, document: Any) -> Response:
    """Drains, swaps the weights in, clears the caches, goes on. What fails is rolled back, and
    serving goes on."""
    body = parse(document, ReloadRequest)
    engine = context.services.engine
    await engine.call("pause", mode=body.mode, clear_cache=True)
    try:
        replies = await engine.call("reload", model=body.model)
    except HeadraceError:
        if body.model:
            await _roll_back(context)
        raise
    finally:
        await engine.call("resume")
    if body.model:
        _remember(context, body.model)
    return json_response({"status": "reloaded", "engines": replies})


async def post_sleep(context: RequestContext, document: Any) -> Response:
    """Lets what runs finish, then gives the memory back; new requests wait until `wake`."""
    body = parse(document, SleepRequest)
    level = await operations.sleep(context, body.level, "wait")
    return json_response({"status": "asleep", "level": level})


async def post_wake(context: RequestContext, document: Any) -> Response:
    """Brings the weights back, or loads them again, and goes on."""
    await operations.wake(context, ())
    return json_response({"status": "awake"})


async def post_reset(context: RequestContext, document: Any) -> Response:
    """Forgets every cached prefix that no running request holds."""
    await operations.reset_prefix_cache(context)
    return json_response({"status": "reset"})


async def post_profile(context: RequestContext, document: Any) -> Response:
    """Traces the steps of every worker until it is stopped; the answer names the folder, then the
    files."""
    body = parse(document, ProfileRequest)
    places = await operations.profile(context, start=body.action == "start")
    status = "profiling" if body.action == "start" else "written"
    return json_response({"status": status, "places": places})


async def post_log_level(context: RequestContext, document: Any) -> Response:
    """Changes what every process of this server logs: API processes, cores, workers and their
    parent."""
    body = parse(document, LogLevelRequest)
    await context.services.engine.call("log_level", level=body.level)
    return json_response({"status": "set", "level": body.level})


async def _roll_back(context: RequestContext) -> None:
    """A core that had swapped already goes back: all serve the same. One that could not swap has
    the old weights."""
    try:
        await context.services.engine.call("reload", model=_model_path(context))
    except HeadraceError as error:
        log.error("a core that failed to reload fails again: %s", error.message)


def _model_path(context: RequestContext) -> str:
    engine = context.services.config["engine"]
    assert isinstance(engine, dict)
    return str(engine["model"]["path"])


def _remember(context: RequestContext, model: str) -> None:
    engine = context.services.config["engine"]
    assert isinstance(engine, dict)
    engine["model"]["path"] = model
