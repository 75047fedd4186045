"""Administration on the API's own port, behind the admin key, under the names that scripts for vLLM
use: each leads to an operation, with that name's defaults and answer.

What is not built here is refused by name: REFUSED is that table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace import __version__
from headrace.base.errors import InvalidRequest
from headrace.front.server.administration import adapters, replicas, weights
from headrace.front.server.administration.operations import OPERATIONS, Json, Operation
from headrace.front.server.administration.parameters import (
    AbortParameters,
    ModelParameters,
    NoParameters,
    PauseParameters,
    ResetParameters,
    SleepParameters,
    WakeParameters,
)
from headrace.front.server.conversation.context import RequestContext

CALLS = {
    "reset_prefix_cache": "reset_prefix_cache",
    "is_paused": "is_paused",
    "status": "status",
    "metrics": "metrics",
}
"""What /collective_rpc may call: method -> a core's operation without arguments. Nothing else is
ever called."""


class CollectiveParameters(msgspec.Struct, frozen=True, kw_only=True):
    """A call to every engine core, by a name of CALLS; it takes no arguments."""

    method: Annotated[str, Meta(max_length=200)]
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


async def collective(context: RequestContext, asked: CollectiveParameters) -> Json:
    """Calls every engine core by a name from a closed list; no other code can be reached, and
    nothing is passed on."""
    if asked.args or asked.kwargs:
        name = "args" if asked.args else "kwargs"
        raise InvalidRequest(f"{name}: these calls take no arguments", field=name)
    operation = CALLS.get(asked.method)
    if operation is None:
        raise InvalidRequest(
            f"method: {asked.method[:50]!r} given; only these may be called: {', '.join(CALLS)}",
            field="method",
        )
    return {"results": await context.services.engine.call(operation)}


async def reset_media(context: RequestContext, asked: NoParameters) -> Json:
    """Nothing of media is cached, so that nothing is left to forget."""
    return {"success": True}


async def kv_event_sources(context: RequestContext, asked: NoParameters) -> Json:
    """None: this server publishes no events of its KV cache."""
    return {"sources": []}


def _unchanged(document: Json) -> Json:
    return document


@dataclass(frozen=True, kw_only=True)
class NamedRoute:
    """A name, and the operation it leads to. `reads`: the fields taken from the request; `fixed`:
    values of its own, which those fields may replace; `answer`: the document as that name has
    it."""

    path: str
    operation: Operation
    reads: type[msgspec.Struct] = NoParameters
    fixed: Mapping[str, Any] = field(default_factory=dict)
    answer: Callable[[Json], Json] = _unchanged
    methods: tuple[str, ...] = ()
    has_body: bool = False


def _info(document: Json) -> Json:
    return {"version": __version__, "config": document}


WEIGHTS = (
    ("/init_weight_transfer_engine", weights.init, weights.InitParameters, True),
    ("/start_weight_update", weights.start, weights.StartParameters, True),
    ("/update_weights", weights.update, weights.UpdateInfoParameters, True),
    ("/finish_weight_update", weights.finish, weights.FinishParameters, True),
    ("/update_weights_from_disk", weights.from_disk, weights.FromDiskParameters, True),
    ("/update_weights_from_tensor", weights.from_tensor, weights.FromTensorParameters, True),
    ("/init_weights_update_group", weights.join, weights.JoinParameters, True),
    ("/destroy_weights_update_group", weights.leave, weights.LeaveParameters, True),
    ("/update_weights_from_distributed", weights.from_group, weights.FromGroupParameters, True),
    ("/update_weight_version", weights.name_version, weights.VersionParameters, True),
    ("/get_weights_by_name", weights.by_name, weights.ByNameParameters, True),
    ("/weights_checker", weights.check, weights.CheckerParameters, True),
    ("/weight_checker", weights.check, weights.CheckerParameters, True),
    ("/weight_info", weights.weights, NoParameters, False),
    ("/get_weight_version", weights.version, NoParameters, False),
)
"""Names of routes, what they do, their fields, and whether they change anything or take a body."""


def _weights(
    path: str, run: Callable[..., Any], parameters: type[msgspec.Struct], *, changes: bool
) -> NamedRoute:
    operation = Operation(name=path.lstrip("/"), run=run, parameters=parameters, changes=changes)
    return NamedRoute(path=path, operation=operation, reads=parameters, has_body=changes)


_AT = {operation.name: operation for operation in OPERATIONS}
_RESET_MEDIA = Operation(name="reset_media", run=reset_media, changes=True)
_ABORTS: Mapping[str, Any] = {"mode": "abort"}
NAMED = (
    NamedRoute(path="/pause", operation=_AT["pause"], reads=PauseParameters, fixed=_ABORTS),
    NamedRoute(path="/resume", operation=_AT["resume"]),
    NamedRoute(path="/is_paused", operation=_AT["is_paused"]),
    NamedRoute(path="/sleep", operation=_AT["sleep"], reads=SleepParameters, fixed=_ABORTS),
    NamedRoute(path="/wake_up", operation=_AT["wake"], reads=WakeParameters),
    NamedRoute(path="/is_sleeping", operation=_AT["is_sleeping"]),
    NamedRoute(
        path="/reset_prefix_cache", operation=_AT["reset_prefix_cache"], reads=ResetParameters
    ),
    NamedRoute(path="/reset_mm_cache", operation=_RESET_MEDIA),
    NamedRoute(path="/reset_encoder_cache", operation=_RESET_MEDIA),
    NamedRoute(path="/start_profile", operation=_AT["profile"], fixed={"action": "start"}),
    NamedRoute(path="/stop_profile", operation=_AT["profile"], fixed={"action": "stop"}),
    NamedRoute(path="/server_info", operation=_AT["config"], answer=_info),
    NamedRoute(
        path="/abort_requests", operation=_AT["abort"], reads=AbortParameters, has_body=True
    ),
    NamedRoute(
        path="/collective_rpc",
        operation=Operation(
            name="collective_rpc", run=collective, parameters=CollectiveParameters, changes=True
        ),
        reads=CollectiveParameters,
        has_body=True,
    ),
    NamedRoute(
        path="/models/load", operation=_AT["load_model"], reads=ModelParameters, has_body=True
    ),
    NamedRoute(
        path="/models/unload", operation=_AT["unload_model"], reads=ModelParameters, has_body=True
    ),
    NamedRoute(
        path="/v1/load_lora_adapter",
        operation=Operation(
            name="load_lora_adapter",
            run=adapters.load,
            parameters=adapters.LoadAdapterParameters,
            changes=True,
        ),
        reads=adapters.LoadAdapterParameters,
        has_body=True,
    ),
    NamedRoute(
        path="/v1/unload_lora_adapter",
        operation=Operation(
            name="unload_lora_adapter",
            run=adapters.unload,
            parameters=adapters.UnloadAdapterParameters,
            changes=True,
        ),
        reads=adapters.UnloadAdapterParameters,
        has_body=True,
    ),
    NamedRoute(
        path="/v1/lora_adapters",
        operation=Operation(name="lora_adapters", run=adapters.listed),
    ),
    *(
        _weights(path, run, parameters, changes=changes)
        for path, run, parameters, changes in WEIGHTS
    ),
    NamedRoute(path="/get_world_size", operation=_AT["world_size"]),
    NamedRoute(
        path="/is_scaling_elastic_ep",
        operation=Operation(name="is_scaling_elastic_ep", run=replicas.is_scaling),
        methods=("GET", "POST"),
    ),
    NamedRoute(
        path="/scale_elastic_ep",
        operation=Operation(
            name="scale_elastic_ep",
            run=replicas.scale,
            parameters=replicas.ScaleParameters,
            changes=True,
        ),
        reads=replicas.ScaleParameters,
        has_body=True,
    ),
    NamedRoute(
        path="/kv_event_sources",
        operation=Operation(name="kv_event_sources", run=kv_event_sources),
    ),
)

_NO_ZMQ = (
    "no pickles are read, over ZMQ or otherwise; POST /update_weights takes handles of GPU memory"
)
_NO_KV_RELEASE = (
    "the KV cache cannot be given back alone; POST /sleep?level=1&mode=keep gives back weights "
    "and cache"
)
_NO_FAULTS = "fault tolerance by hand is not part of this server; cores that die are restarted"
REFUSED: Mapping[str, str] = {
    "/release_kv_cache": _NO_KV_RELEASE,
    "/release_kv_cache_memory": _NO_KV_RELEASE,
    "/update_weights_from_ipc": _NO_ZMQ,
    "/fault_tolerance/apply": _NO_FAULTS,
    "/fault_tolerance/status": _NO_FAULTS,
}
"""Routes of other servers for what is not built here, and the words they are refused with."""
ADMIN = frozenset(route.path for route in NAMED) | REFUSED.keys()
READS = frozenset(route.path for route in NAMED if not route.operation.changes)
"""Administrative routes that change nothing."""
