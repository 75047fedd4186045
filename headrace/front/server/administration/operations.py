"""What administration can do: the table of operations, and the functions that do them.

Three ways to ask are made from the table: the admin API (`/v1/admin/NAME`, server/table.py), the
gRPC service `headrace.admin.v1.Admin` (grpc/admin.py) and `headrace admin NAME` (cli/admin.py). The
names that scripts for other servers use (named.py, grpc/control.py) lead to the same operations.

The states live in the engine cores, so that they are the same through every API process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace import __version__
from headrace.base.errors import Conflict, Forbidden, HeadraceError, InvalidRequest
from headrace.front.server.administration.parameters import (
    PARTS,
    AbortParameters,
    LogLevelParameters,
    Mode,
    ModelParameters,
    NoParameters,
    PauseParameters,
    ProfileParameters,
    ReloadParameters,
    RequestsParameters,
    ResetParameters,
    SleepParameters,
    WakeParameters,
)
from headrace.front.server.administration.weights import (
    UpdateParameters,
    update_weights,
    weights,
)
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.model_choice import ModelChoice
from headrace.front.server.http.auth import ADMIN_TENANT, is_ours, own_id, request_id

log = logging.getLogger(__name__)
Json = dict[str, Any]


async def health(context: RequestContext, asked: NoParameters) -> Json:
    """Whether the engine runs, is paused or asleep; 503 when it is dead."""
    services = context.services
    alive = services.engine.ready and services.engine.alive
    replies = await services.engine.call_each("status") if alive else []
    engines = [reply for reply in replies if isinstance(reply, dict)]
    return {
        "status": "ok" if alive else "unavailable",
        "version": __version__,
        "is_running": alive,
        "is_paused": any(engine["paused"] for engine in engines),
        "is_asleep": bool(engines) and all(engine["asleep"] for engine in engines),
        "sleep_level": max((engine["sleep_level"] for engine in engines), default=0),
        "trouble": services.engine.trouble or None,
        "is_draining": services.draining,
    }


async def models(context: RequestContext, asked: NoParameters) -> Json:
    """The names that are served, and what is behind them; of several models, what becomes of
    each."""
    services = context.services
    if services.models is not None:
        states = await services.models.states()
        return {"models": [{"id": s.name, **msgspec.to_builtins(s)} for _, s in states]}
    engine = services.config.get("engine")
    model = engine["model"] if isinstance(engine, dict) else {}
    wanted = ("path", "family", "format", "dtype", "quantization", "max_model_len")
    facts = {name: model.get(name) for name in wanted}
    return {"models": [{"id": name, **facts} for name in services.text.model_names]}


async def load_model(context: RequestContext, asked: ModelParameters) -> Json:
    """Loads one of several models, or wakes it; answers once it is loaded."""
    await _several(context).change(asked.model, load=True)
    return {"success": True, "model": asked.model}


async def unload_model(context: RequestContext, asked: ModelParameters) -> Json:
    """Unloads one of several models; answers once its requests have ended and its memory is free.
    Requests that come meanwhile wait until it is loaded again."""
    await _several(context).change(asked.model, load=False)
    return {"success": True, "model": asked.model}


def _several(context: RequestContext) -> ModelChoice:
    models = context.services.models
    if models is None:
        raise Conflict("this server has one model, which is loaded; --models-dir serves several")
    return models


async def config(context: RequestContext, asked: NoParameters) -> Json:
    """The resolved configuration, without keys, and every decision that was made for the user."""
    resolved = context.services.config
    engine: Any = resolved.get("engine") or {"model": {}, "device": {}}
    short = {
        "model": context.services.text.model_names[0],
        "dtype": engine["model"].get("dtype"),
        "max_model_len": context.services.text.max_model_len,
        "tp": engine["device"].get("tensor_parallel", 1),
        "pp": engine["device"].get("pipeline_parallel", 1),
        "dp": 1 if (cores := context.services.replicas) is None else len(cores.expected),
    }
    whole, group = (engine["device"].get(name) for name in ("expert_parallel", "expert_group"))
    ranks = short["tp"] * (short["dp"] if group else 1)
    return {**short, "ep": ranks if whole else 1, **resolved}


async def queue(context: RequestContext, asked: NoParameters) -> Json:
    """Who runs, who waits, and why."""
    engines: list[Any] = await context.services.engine.call("status")
    wanted = (
        *("running", "waiting", "waiting_tokens", "waiting_by_reason", "waiting_by_tenant"),
        *("free_rows", "total_rows", "free_blocks", "total_blocks", "tokens_per_s"),
    )
    queues = [{name: engine[name] for name in wanted} for engine in engines]
    load = context.services.shares.total
    return {"server_load": load, "load_tracking_enabled": True, "engines": queues}


def _without_others(engine: Json, tenant: str) -> Json:
    """A core's status without what it tells of other keys but their sum."""
    waiting: Counter[str] = Counter()
    for name, count in engine.get("waiting_by_tenant", {}).items():
        own = not tenant or tenant.startswith(name)
        waiting[name if own else "other keys"] += count
    return {**engine, "waiting_by_tenant": dict(waiting)}


async def ledger(context: RequestContext, asked: NoParameters) -> Json:
    """What is held now, in numbers; at rest all of it is back at the baseline."""
    services = context.services
    engines: list[Any] = await services.engine.call("status")
    if context.tenant != ADMIN_TENANT:
        engines = [_without_others(engine, context.tenant) for engine in engines]
    process = {
        "pid": os.getpid(),
        "generations": services.shares.total,
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
    }
    return {"engines": engines, "process": process}


async def requests(context: RequestContext, asked: RequestsParameters) -> Json:
    """Where a request is and why it waits. An id that its client chose names requests of the same
    key only; for an administrator, those of all."""
    anybody = context.tenant == ADMIN_TENANT or is_ours(asked.id)
    tenant = None if anybody else context.tenant
    return await context.services.engine.explain(asked.id, tenant=tenant)


async def is_paused(context: RequestContext, asked: NoParameters) -> Json:
    """Whether any core is paused: then requests are held."""
    replies = await context.services.engine.call_each("is_paused")
    errors = [reply for reply in replies if isinstance(reply, HeadraceError)]
    if errors and len(errors) == len(replies):
        raise errors[0]
    paused = [reply for reply in replies if isinstance(reply, dict) and reply.get("paused")]
    return {"is_paused": bool(paused)}


async def is_sleeping(context: RequestContext, asked: NoParameters) -> Json:
    """Whether every core is asleep."""
    replies: list[Any] = await context.services.engine.call("status")
    return {"is_sleeping": bool(replies) and all(reply["asleep"] for reply in replies)}


async def world_size(context: RequestContext, asked: NoParameters) -> Json:
    """Workers of all engine cores."""
    return {"world_size": num_workers(context)}


def num_workers(context: RequestContext) -> int:
    """Workers of all engine cores."""
    resolved = context.services.config
    engine: Any = resolved.get("engine")
    if not engine:
        return 0
    device, cores = engine["device"], context.services.replicas
    copies = 1 if cores is None else len(cores.expected)
    return int(device["tensor_parallel"]) * int(device["pipeline_parallel"]) * copies


async def pause(context: RequestContext, asked: PauseParameters) -> Json:
    """Pauses every core; answers once the pause is complete (mode wait: once running requests have
    ended). Where one core cannot be paused, none stays paused by this call."""
    await _pause(context, asked.mode, clear_cache=asked.clear_cache)
    return {"status": "paused", "mode": asked.mode}


async def _pause(context: RequestContext, mode: Mode, *, clear_cache: bool) -> None:
    engine, token = context.services.engine, request_id()
    replies = await engine.call_each("pause", mode=mode, clear_cache=clear_cache, token=token)
    errors = [reply for reply in replies if isinstance(reply, HeadraceError)]
    if errors:
        await engine.call_each("undo_pause", token=token)
        raise errors[0]


async def resume(context: RequestContext, asked: NoParameters) -> Json:
    """Lets every core run again; one that cannot be reached does not keep the others paused."""
    for reply in await context.services.engine.call_each("resume"):
        if isinstance(reply, HeadraceError):
            raise reply
    return {"status": "resumed"}


async def reload_model(context: RequestContext, asked: ReloadParameters) -> Json:
    """Drains, swaps the weights in, clears the caches, goes on. What fails is rolled back, and
    serving goes on."""
    engine = context.services.engine
    await engine.call("pause", mode=asked.mode, clear_cache=True)
    try:
        replies = await engine.call("reload", model=asked.model)
    except HeadraceError:
        if asked.model:
            await _roll_back(context)
        raise
    finally:
        await engine.call("resume")
    if asked.model:
        _model_config(context)["path"] = asked.model
    return {"status": "reloaded", "engines": replies}


async def _roll_back(context: RequestContext) -> None:
    """A core that had swapped already goes back: all serve the same. One that could not swap has
    the old weights."""
    try:
        await context.services.engine.call("reload", model=str(_model_config(context)["path"]))
    except HeadraceError as error:
        log.error("a core that failed to reload fails again: %s", error.message)


def _model_config(context: RequestContext) -> Json:
    engine: Any = context.services.config["engine"]
    model: Json = engine["model"]
    return model


async def sleep(context: RequestContext, asked: SleepParameters) -> Json:
    """Pauses every core, and gives back the KV cache and the device's weights; new requests wait
    until it wakes. The answer names the level it came to: what cannot be kept is dropped."""
    await _pause(context, asked.mode, clear_cache=asked.level > 0)
    level: int = asked.level
    if level:
        replies: list[Any] = await context.services.engine.call("sleep", level=level)
        level = max([level, *(int(reply["level"]) for reply in replies)])
    return {"status": "sleeping", "level": level}


async def wake(context: RequestContext, asked: WakeParameters) -> Json:
    """Brings back or loads what sleeping gave back, and goes on. Parts that are named one by one
    come once all have been named; until then it sleeps."""
    if strange := [part for part in asked.tags if part not in PARTS]:
        raise InvalidRequest(
            f"tags: {strange[0][:50]!r} given; allowed: {', '.join(PARTS)}", field="tags"
        )
    parts = asked.tags or list(PARTS)
    engine = context.services.engine
    replies: list[Any] = await engine.call("wake", parts=parts)
    if any(reply["asleep"] or reply["awaited"] for reply in replies):
        return {"status": "sleeping", "tags": parts}
    await engine.call("resume")
    return {"status": "awake", "tags": parts}


async def reset_prefix_cache(context: RequestContext, asked: ResetParameters) -> Json:
    """Forgets every cached prefix that no running request holds."""
    replies: list[Any] = await context.services.engine.call(
        "reset_prefix_cache", running=asked.reset_running_requests
    )
    return {"success": all(reply["reset"] for reply in replies)}


async def abort(context: RequestContext, asked: AbortParameters) -> Json:
    """Ends requests in flight, of whoever asked for them: those with these ids, or all."""
    if (asked.request_ids is None) is not asked.all:
        raise InvalidRequest("request_ids: give a list of ids, or all: true", field="request_ids")
    return await aborted(context, asked.request_ids, tenant=None)


async def aborted(
    context: RequestContext, ids: Sequence[str] | None, *, tenant: str | None
) -> Json:
    """Ends the requests with these public ids (None: all) of this tenant (None: of all); how many.
    A tenant may also give the ids that it named its requests by."""
    own = [] if tenant is None or ids is None else [own_id(tenant, one) for one in ids]
    labels = None if ids is None else [*ids, *own]
    engine = context.services.engine
    replies: list[Any] = await engine.call("abort", labels=labels, tenant=tenant)
    return {"status": "aborted", "aborted": sum(reply["aborted"] for reply in replies)}


async def profile(context: RequestContext, asked: ProfileParameters) -> Json:
    """Traces the steps of every worker until it is stopped, with --profile-dir; the answer names
    the folder, then the files."""
    folder = context.services.server.profile_dir
    if folder is None:
        raise Forbidden("profiling is off: start the server with --profile-dir FOLDER")
    starts = asked.action == "start"
    replies: list[Any] = await context.services.engine.call(
        "profile", folder=folder if starts else None
    )
    places = sorted({place for engine in replies for place in engine["places"]})
    return {"status": "profiling" if starts else "written", "places": places}


async def log_level(context: RequestContext, asked: LogLevelParameters) -> Json:
    """Changes what every process of this server logs: API processes, cores, workers and their
    parent."""
    await context.services.engine.call("log_level", level=asked.level)
    return {"status": "set", "level": asked.level}


async def shutdown(context: RequestContext, asked: NoParameters) -> Json:
    """Ends the server as SIGTERM does: it drains, within --shutdown-timeout-s. Accepted, not
    complete."""
    context.services.shut_down()
    return {"status": "shutting down"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A row: its function answers with a JSON document. `changes`: refused under
    --admin-readonly. `path`: below /v1/admin/, where it is not the name."""

    name: str
    run: Callable[[RequestContext, Any], Awaitable[Json]]
    parameters: type[msgspec.Struct] = NoParameters
    changes: bool = False
    path: str = ""

    @property
    def doc(self) -> str:
        """What it does, on one line."""
        return " ".join((self.run.__doc__ or "").split())

    @property
    def method(self) -> str:
        """Of its HTTP route."""
        return "POST" if self.changes else "GET"


PREFIX = "/v1/admin"
OPERATIONS = (
    Operation(name="health", run=health),
    Operation(name="models", run=models),
    Operation(name="config", run=config),
    Operation(name="queue", run=queue),
    Operation(name="ledger", run=ledger),
    Operation(name="requests", run=requests, parameters=RequestsParameters, path="requests/{id}"),
    Operation(name="is_paused", run=is_paused),
    Operation(name="is_sleeping", run=is_sleeping),
    Operation(name="world_size", run=world_size),
    Operation(name="pause", run=pause, parameters=PauseParameters, changes=True),
    Operation(name="drain", run=pause, parameters=PauseParameters, changes=True),
    Operation(name="resume", run=resume, changes=True),
    Operation(name="reload_model", run=reload_model, parameters=ReloadParameters, changes=True),
    Operation(name="load_model", run=load_model, parameters=ModelParameters, changes=True),
    Operation(name="unload_model", run=unload_model, parameters=ModelParameters, changes=True),
    Operation(name="sleep", run=sleep, parameters=SleepParameters, changes=True),
    Operation(name="wake", run=wake, parameters=WakeParameters, changes=True),
    Operation(
        name="reset_prefix_cache", run=reset_prefix_cache, parameters=ResetParameters, changes=True
    ),
    Operation(name="weights", run=weights),
    Operation(name="update_weights", run=update_weights, parameters=UpdateParameters, changes=True),
    Operation(name="abort", run=abort, parameters=AbortParameters, changes=True),
    Operation(name="profile", run=profile, parameters=ProfileParameters, changes=True),
    Operation(name="log_level", run=log_level, parameters=LogLevelParameters, changes=True),
    Operation(name="shutdown", run=shutdown, changes=True),
)
