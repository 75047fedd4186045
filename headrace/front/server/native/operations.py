"""What administration does, for every way to ask for it: the plane, the names that scripts for vLLM use, and gRPC.

The states live in the engine cores, so that they are the same through every API process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.base.errors import Forbidden, InvalidRequest
from headrace.front.server.exchange import Exchange
from headrace.front.server.ids import own_id

PARTS = ("weights", "kv_cache")
NO_LORA = "LoRA adapters are not part of this server"
NO_TRANSFER = "weight transfer is not part of this server; POST /v1/admin/reload_model swaps in weights from a folder"
CALLS = {
    "reset_prefix_cache": "reset_prefix_cache",
    "is_paused": "is_paused",
    "status": "status",
    "metrics": "metrics",
}
"""What /collective_rpc may call: method -> a core's operation without arguments. Nothing else is ever called."""


async def pause(exchange: Exchange, mode: str, *, clear_cache: bool) -> None:
    """Pauses every core; returns once the pause is complete (mode wait: once running requests have ended)."""
    await exchange.services.engine.call("pause", mode=mode, clear_cache=clear_cache)


async def resume(exchange: Exchange) -> None:
    """Lets every core run again."""
    await exchange.services.engine.call("resume")


async def is_paused(exchange: Exchange) -> bool:
    """Whether every core is paused."""
    found: list[Any] = await exchange.services.engine.call("is_paused")
    return bool(found) and all(reply["paused"] for reply in found)


async def sleep(exchange: Exchange, level: int, mode: str) -> int:
    """Pauses (level 0), and gives back the KV cache and the device's weights (1: they wait in host memory; 2: they are
    loaded again on waking). The level it came to: what cannot be kept is dropped."""
    await pause(exchange, mode, clear_cache=level > 0)
    if not level:
        return 0
    found: list[Any] = await exchange.services.engine.call("sleep", level=level)
    return max([level, *(int(reply["level"]) for reply in found)])


async def wake(exchange: Exchange, parts: Sequence[str]) -> bool:
    """Calls these parts back (none named: all). They come together once all have been called; whether all are awake."""
    if strange := [part for part in parts if part not in PARTS]:
        raise InvalidRequest(
            f"tags: {strange[0][:50]!r} given; allowed: {', '.join(PARTS)}", field="tags"
        )
    engine = exchange.services.engine
    found: list[Any] = await engine.call("wake", parts=list(parts) or list(PARTS))
    if any(reply["asleep"] or reply["awaited"] for reply in found):
        return False
    await engine.call("resume")
    return True


async def is_sleeping(exchange: Exchange) -> bool:
    """Whether every core is asleep."""
    found: list[Any] = await exchange.services.engine.call("status")
    return bool(found) and all(reply["asleep"] for reply in found)


async def abort(exchange: Exchange, ids: Sequence[str] | None, *, tenant: str | None) -> int:
    """Ends the requests with these public ids (None: all) of this tenant (None: of all); how many. A tenant may also
    give the ids that it named its requests by."""
    own = [] if tenant is None or ids is None else [own_id(tenant, one) for one in ids]
    labels = None if ids is None else [*ids, *own]
    engine = exchange.services.engine
    found: list[Any] = await engine.call("abort", labels=labels, tenant=tenant)
    return sum(reply["aborted"] for reply in found)


async def reset_prefix_cache(exchange: Exchange, *, running: bool = False) -> bool:
    """Forgets every cached prefix that no running request holds; with `running` these give theirs up too."""
    found: list[Any] = await exchange.services.engine.call("reset_prefix_cache", running=running)
    return all(reply["reset"] for reply in found)


async def profile(exchange: Exchange, *, start: bool) -> list[str]:
    """Starts a trace of every worker's steps (told: the folder) or ends it (the files)."""
    folder = exchange.services.server.profile_dir
    if folder is None:
        raise Forbidden("profiling is off: start the server with --profile-dir FOLDER")
    found: list[Any] = await exchange.services.engine.call(
        "profile", folder=folder if start else None
    )
    return sorted({place for engine in found for place in engine["places"]})


async def collective(exchange: Exchange, method: str) -> list[Any]:
    """The replies of all cores to one of the calls there are names for."""
    operation = CALLS.get(method)
    if operation is None:
        raise InvalidRequest(
            f"method: {method[:50]!r} given; only these may be called: {', '.join(CALLS)}",
            field="method",
        )
    return await exchange.services.engine.call(operation)


def world_size(exchange: Exchange) -> int:
    """Workers of all cores."""
    config = exchange.services.config
    engine: Any = config.get("engine")
    replicas: Any = config.get("replicas", 1)
    return int(engine["device"]["tensor_parallel"]) * int(replicas) if engine else 0
