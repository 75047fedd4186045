"""What administration does, for every way to ask for it: the admin API, the names that scripts for
vLLM use, and gRPC.

The states live in the engine cores, so that they are the same through every API process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

from headrace.base.config.resolved import ServerSpec
from headrace.base.errors import Forbidden, HeadraceError, InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.auth import (
    ADMIN_TENANT,
    ApiKeyAuthenticator,
    is_ours,
    own_id,
    request_id,
)

ADMIN = frozenset(
    {
        *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
        *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
        *("/start_profile", "/stop_profile", "/server_info"),
        *("/abort_requests", "/collective_rpc", "/get_world_size", "/is_scaling_elastic_ep"),
        *("/kv_event_sources", "/release_kv_cache", "/release_kv_cache_memory"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/init_weight_transfer_engine"),
        *("/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/update_weight_version", "/weight_info", "/weight_checker", "/scale_elastic_ep"),
        *("/fault_tolerance/apply", "/fault_tolerance/status"),
    }
)


READS = frozenset(
    {
        *("/is_paused", "/is_sleeping", "/server_info", "/get_world_size"),
        *("/is_scaling_elastic_ep", "/kv_event_sources"),
    }
)
"""Administrative routes that change nothing."""


def api_authenticator(spec: ServerSpec, *, public: frozenset[str]) -> ApiKeyAuthenticator:
    """Who may ask the API, and with which key the routes of administration on it."""
    return ApiKeyAuthenticator(
        api_key_digests=spec.api_key_digests,
        admin_key_digest=spec.admin_key_digest,
        public_metrics=spec.public_metrics,
        admin=ADMIN,
        admin_reads=READS,
        public=public,
        readonly=spec.admin_readonly,
    )


PARTS = ("weights", "kv_cache")


NO_LORA = "LoRA adapters are not part of this server"


NO_TRANSFER = "weight transfer is not part of this server; POST /v1/admin/reload_model swaps in weights from a folder"


CALLS = {
    "reset_prefix_cache": "reset_prefix_cache",
    "is_paused": "is_paused",
    "status": "status",
    "metrics": "metrics",
}
"""What /collective_rpc may call: method -> a core's operation without arguments. Nothing else is
ever called."""


async def explain(context: RequestContext, ident: str) -> dict[str, object]:
    """Where a request is and why it waits. An id that its client chose names requests of the same
    key only; for an administrator, those of all."""
    anybody = context.tenant == ADMIN_TENANT or is_ours(ident)
    tenant = None if anybody else context.tenant
    return await context.services.engine.explain(ident, tenant=tenant)


async def pause(context: RequestContext, mode: str, *, clear_cache: bool) -> None:
    """Pauses every core; returns once the pause is complete (mode wait: once running requests have
    ended). Where one core cannot be paused, none stays paused by this call."""
    engine, token = context.services.engine, request_id()
    replies = await engine.call_each("pause", mode=mode, clear_cache=clear_cache, token=token)
    errors = [reply for reply in replies if isinstance(reply, HeadraceError)]
    if errors:
        await engine.call_each("undo_pause", token=token)
        raise errors[0]


async def resume(context: RequestContext) -> None:
    """Lets every core run again; one that cannot be told does not keep the others paused."""
    replies = await context.services.engine.call_each("resume")
    for reply in replies:
        if isinstance(reply, HeadraceError):
            raise reply


async def is_paused(context: RequestContext) -> bool:
    """Whether any core is paused: then requests are held."""
    replies = await context.services.engine.call_each("is_paused")
    errors = [reply for reply in replies if isinstance(reply, HeadraceError)]
    if errors and len(errors) == len(replies):
        raise errors[0]
    return any(_is_paused(reply) for reply in replies)


def _is_paused(reply: object) -> bool:
    return isinstance(reply, dict) and bool(reply.get("paused"))


async def sleep(context: RequestContext, level: int, mode: str) -> int:
    """Pauses (level 0), and gives back the KV cache and the device's weights (1: they wait in host
    memory; 2: they are loaded again on waking). The level it came to: what cannot be kept is
    dropped."""
    await pause(context, mode, clear_cache=level > 0)
    if not level:
        return 0
    replies: list[Any] = await context.services.engine.call("sleep", level=level)
    return max([level, *(int(reply["level"]) for reply in replies)])


async def wake(context: RequestContext, parts: Sequence[str]) -> bool:
    """Calls these parts back (none named: all). They come together once all have been called;
    whether all are awake."""
    if strange := [part for part in parts if part not in PARTS]:
        raise InvalidRequest(
            f"tags: {strange[0][:50]!r} given; allowed: {', '.join(PARTS)}", field="tags"
        )
    engine = context.services.engine
    replies: list[Any] = await engine.call("wake", parts=list(parts) or list(PARTS))
    if any(reply["asleep"] or reply["awaited"] for reply in replies):
        return False
    await engine.call("resume")
    return True


async def is_sleeping(context: RequestContext) -> bool:
    """Whether every core is asleep."""
    replies: list[Any] = await context.services.engine.call("status")
    return bool(replies) and all(reply["asleep"] for reply in replies)


async def abort(context: RequestContext, ids: Sequence[str] | None, *, tenant: str | None) -> int:
    """Ends the requests with these public ids (None: all) of this tenant (None: of all); how many.
    A tenant may also give the ids that it named its requests by."""
    own = [] if tenant is None or ids is None else [own_id(tenant, one) for one in ids]
    labels = None if ids is None else [*ids, *own]
    engine = context.services.engine
    replies: list[Any] = await engine.call("abort", labels=labels, tenant=tenant)
    return sum(reply["aborted"] for reply in replies)


async def reset_prefix_cache(context: RequestContext, *, running: bool = False) -> bool:
    """Forgets every cached prefix that no running request holds; with `running` these give theirs
    up too."""
    replies: list[Any] = await context.services.engine.call("reset_prefix_cache", running=running)
    return all(reply["reset"] for reply in replies)


async def profile(context: RequestContext, *, start: bool) -> list[str]:
    """Starts a trace of every worker's steps (told: the folder) or ends it (the files)."""
    folder = context.services.server.profile_dir
    if folder is None:
        raise Forbidden("profiling is off: start the server with --profile-dir FOLDER")
    replies: list[Any] = await context.services.engine.call(
        "profile", folder=folder if start else None
    )
    return sorted({place for engine in replies for place in engine["places"]})


async def collective(context: RequestContext, method: str) -> list[Any]:
    """The replies of all cores to one of the calls there are names for."""
    operation = CALLS.get(method)
    if operation is None:
        raise InvalidRequest(
            f"method: {method[:50]!r} given; only these may be called: {', '.join(CALLS)}",
            field="method",
        )
    return await context.services.engine.call(operation)


def world_size(context: RequestContext) -> int:
    """Workers of all cores."""
    config = context.services.config
    engine: Any = config.get("engine")
    replicas: Any = config.get("replicas", 1)
    return int(engine["device"]["tensor_parallel"]) * int(replicas) if engine else 0


async def ledger(context: RequestContext) -> dict[str, object]:
    """What is held now: at rest all of it is back at the baseline."""
    services = context.services
    engines = await services.engine.call("status")
    process = {
        "pid": os.getpid(),
        "generations": services.shares.total,
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
    }
    return {"engines": engines, "process": process}
