"""Control calls: status, explain, metrics, pause and resume, drain, reset of the prefix cache.

A pause or a drain is answered only once it is complete: `advance` looks after every step whether
it is. Pause modes: `abort` ends everything now; `wait` lets running requests finish; `keep` freezes
everything as it is. New requests are held meanwhile, not refused; while draining they are refused.

The engine core is an argument of every operation, so that neither owns the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import msgspec

from headrace.base.errors import (
    Conflict,
    HeadraceError,
    InvalidRequest,
    WireError,
    to_wire,
)
from headrace.base.telemetry import log as logs
from headrace.base.wire.control import Call, Reply
from headrace.core import reports, slots
from headrace.core.adapters import NO_ADAPTERS, Adapters
from headrace.core.draining import Drain
from headrace.core.lifecycle import ExecutorHost, ExecutorLifecycle
from headrace.core.output_processor import OutputBuffer
from headrace.core.ports import ExpertWorkers
from headrace.core.reports import Document, EngineView
from headrace.core.request import Request
from headrace.core.service_state import PauseMode, RequestIndex, ServiceState
from headrace.core.weights import check_state, order_of


class ControlledEngine(EngineView, ExecutorHost, Protocol):
    """What control operations may ask of the engine core."""

    @property
    def requests(self) -> RequestIndex:
        """The requests in flight."""
        ...

    @property
    def output_buffer(self) -> OutputBuffer:
        """Where replies go that come later than their call."""
        ...

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests."""
        ...

    def end(
        self,
        request: Request,
        reason: str,
        *,
        stop_id: int | None = None,
        error: WireError | None = None,
        forget: bool = False,
    ) -> None:
        """Ends one request, with a reason."""
        ...


Operation = Callable[[ControlledEngine, Call], object]
"""Runs a call; the result, or None if the reply comes once the operation is complete."""


def pause_is_complete(engine: ControlledEngine) -> bool:
    """Whether nothing is in flight, no KV is being copied and, in mode wait, nothing that has begun
    is left."""
    if engine.num_in_flight or engine.weights.keeps_executor:
        return False
    if engine.service.pause is PauseMode.WAIT:
        return engine.scheduler.num_running == 0 and not _has_begun(engine)
    return True


class Control:
    """The control calls of one core.

    `_waiting_pause` holds the numbers of calls whose pause is not complete; `_undo` the last pause
    that can be undone: its token and the mode before it.
    """

    def __init__(self, lifecycle: ExecutorLifecycle) -> None:
        self._clear_cache = False
        self._waiting_pause: list[int] = []
        self._drain = Drain()
        self._undo: tuple[str, PauseMode | None] | None = None
        self._operations: dict[str, Operation] = {
            "status": lambda engine, call: reports.status(engine),
            "explain": _explain,
            "slots": slots.listed,
            "slot": slots.carry_out,
            "metrics": lambda engine, call: reports.metrics(engine),
            "is_paused": lambda engine, call: _pause_state(engine.service),
            "pause": self._pause,
            "undo_pause": self._undo_pause,
            "resume": self._resume,
            "drain": self._drain.begin,
            "undo_drain": self._drain.undo,
            "reset_prefix_cache": _reset,
            "abort": _abort,
            "log_level": _set_log_level,
            "load_adapter": _load_adapter,
            "unload_adapter": _unload_adapter,
            "adapters": _list_adapters,
            "profile": _profile,
            "share_experts": _share_experts,
            "weights": partial(_weigh, lifecycle),
            "weights_version": _name_weights,
            "reload": lifecycle.reload,
            "sleep": lifecycle.sleep,
            "wake": lifecycle.wake,
        }

    def call(self, engine: ControlledEngine, call: Call) -> Reply | None:
        """Runs an operation; None if its reply comes later. A bad call is answered with an
        error."""
        operation = self._operations.get(call.operation)
        try:
            if operation is None:
                known = ", ".join(sorted(self._operations))
                raise InvalidRequest(
                    f"unknown operation {call.operation!r} (known: {known})", field="operation"
                )
            result = operation(engine, call)
        except Exception as error:
            return Reply(number=call.number, error=to_wire(error))
        if result is None:
            self.advance(engine)
            return None
        return _reply(call.number, result)

    def advance(self, engine: ControlledEngine) -> None:
        """Answers the pauses and drains that have become complete."""
        if engine.adapters is not None:
            engine.adapters.advance()
        if engine.weights.poll_at is not None:
            engine.weights.advance()
        if self._waiting_pause and pause_is_complete(engine):
            if self._clear_cache:
                _reset_prefix_cache(engine)
            _answer(engine, self._waiting_pause, _pause_state(engine.service))
        if engine.service.draining:
            self._drain.advance(engine)

    # pause and resume

    def _pause(self, engine: ControlledEngine, call: Call) -> None:
        """Pauses in `mode`. With a `token` this pause can be undone, as when it fails on another
        replica."""
        mode = _pause_mode(call)
        clear = call.arguments.get("clear_cache", False)
        if not isinstance(clear, bool):
            raise InvalidRequest(
                f"clear_cache is {clear!r}, true or false is allowed", field="clear_cache"
            )
        service = engine.service
        if mode is PauseMode.WAIT and not service.has_executor and _has_begun(engine):
            raise Conflict("the engine is asleep, and requests that have begun wait: wake it first")
        token = str(call.arguments.get("token") or "")
        self._undo = (token, service.pause) if token else None
        service.pause = mode
        self._clear_cache = clear and mode is not PauseMode.KEEP
        if mode is PauseMode.ABORT:
            engine.abort([request.id for request in engine.requests])
        self._waiting_pause.append(call.number)

    def _undo_pause(self, engine: ControlledEngine, call: Call) -> Document:
        """Goes back to the mode before the pause with this token, if that is the last one here. A
        core that never saw the token stays as it is."""
        token = call.arguments.get("token")
        if self._undo is not None and token == self._undo[0]:
            before, self._undo = self._undo[1], None
            engine.service.pause = before
            self._fail_waiting(engine, "the pause was undone: it failed on another replica")
        return _pause_state(engine.service)

    def _resume(self, engine: ControlledEngine, call: Call) -> Document:
        if engine.service.asleep:
            raise Conflict("the engine is asleep: wake it first")
        if reason := engine.weights.blocks_resume:
            raise Conflict(reason)
        engine.service.pause = self._undo = None
        self._fail_waiting(engine, "resumed before the pause was complete")
        return _pause_state(engine.service)

    def _fail_waiting(self, engine: ControlledEngine, reason: str) -> None:
        """Answers the pauses that are not complete with a Conflict."""
        error = to_wire(Conflict(reason))
        for number in self._waiting_pause:
            engine.output_buffer.add_reply(Reply(number=number, error=error))
        self._waiting_pause.clear()


def _pause_mode(call: Call) -> PauseMode:
    mode = call.arguments.get("mode", PauseMode.WAIT.value)
    if mode not in {pause.value for pause in PauseMode}:
        raise InvalidRequest(f"mode is {mode!r}, allowed are abort, wait and keep", field="mode")
    return PauseMode(mode)


def _pause_state(service: ServiceState) -> Document:
    return {"paused": service.pause is not None, "mode": service.mode}


def _has_begun(engine: ControlledEngine) -> bool:
    """Whether a request waits that has run before."""
    return any(request.scheduled_at is not None for request in engine.scheduler.queue)


def _explain(engine: ControlledEngine, call: Call) -> Document:
    """The requests with these engine `ids` or public `labels`, by engine id."""
    ids = _ids(call, "ids") or []
    labels = _ids(call, "labels") or []
    matches = {i: engine.requests[i] for i in ids if isinstance(i, int) and i in engine.requests}
    tenant = _tenant(call)
    for request in engine.requests.find([str(label) for label in labels], tenant=tenant):
        matches[request.id] = request
    return {str(i): reports.explain(engine, request) for i, request in matches.items()}


def _abort(engine: ControlledEngine, call: Call) -> Document:
    """Ends the requests with these public ids (all: none given), of one tenant if one is named."""
    labels = _ids(call, "labels")
    names = None if labels is None else [str(label) for label in labels]
    requests = engine.requests.find(names, tenant=_tenant(call))
    engine.abort([request.id for request in requests])
    return {"aborted": len(requests)}


def _ids(call: Call, field: str) -> list[int | str] | None:
    ids = call.arguments.get(field)
    if ids is not None and not isinstance(ids, list):
        raise InvalidRequest(f"{field} is {ids!r}, a list of ids is wanted", field=field)
    return ids


def _tenant(call: Call) -> str | None:
    tenant = call.arguments.get("tenant")
    return None if tenant is None else str(tenant)


def _profile(engine: ControlledEngine, call: Call) -> Document:
    """Starts (`folder`) or stops (no folder) a trace of the workers' steps."""
    folder = call.arguments.get("folder")
    if folder is not None and not isinstance(folder, str):
        raise InvalidRequest(f"folder is {folder!r}, a path is wanted", field="folder")
    if not engine.service.has_executor:
        raise Conflict("the engine is asleep: wake it first")
    return {"places": engine.executor.profile(folder)}


def _share_experts(engine: ControlledEngine, call: Call) -> Document:
    """The first `cores` engine cores share out the experts, and meet in `folder`."""
    workers, cores, folder = engine.executor, call.arguments["cores"], call.arguments["folder"]
    if not isinstance(workers, ExpertWorkers) or not isinstance(cores, int):
        raise InvalidRequest("this engine shares out no experts")
    if engine.requests or engine.num_in_flight:
        raise Conflict("requests are under way: drain the engine first")
    workers.share_experts(cores, str(folder))
    return {"cores": cores}


def _set_log_level(engine: ControlledEngine, call: Call) -> Document:
    """Of this process and its workers; fronts hear of it in the next Hello."""
    level = str(call.arguments.get("level"))
    if level not in logs.LEVELS:
        raise InvalidRequest(f"level is {level!r}, allowed are {', '.join(logs.LEVELS)}")
    logs.set_level(level)
    if engine.service.has_executor:
        engine.executor.log_level(level)
    engine.service.log_level = level
    return {"level": level}


def _list_adapters(engine: ControlledEngine, call: Call) -> Document:
    return {"adapters": [] if engine.adapters is None else engine.adapters.describe()}


def _adapters(engine: ControlledEngine) -> Adapters:
    if engine.adapters is None:
        raise InvalidRequest(NO_ADAPTERS)
    return engine.adapters


def _load_adapter(engine: ControlledEngine, call: Call) -> None:
    """Reads the adapter in `folder`, to be named `name`; answered once it is read. `replaces`: one
    of that name may be there."""
    arguments, number = call.arguments, call.number

    def on_done(error: HeadraceError | None) -> None:
        wrong = None if error is None else to_wire(error)
        done = Reply(number=number, error=wrong) if wrong else _reply(number, {"loaded": True})
        engine.output_buffer.add_reply(done)

    name, folder = str(arguments.get("name", "")), str(arguments.get("folder", ""))
    _adapters(engine).load(name, folder, on_done, replaces=arguments.get("replaces") is True)


def _unload_adapter(engine: ControlledEngine, call: Call) -> Document:
    _adapters(engine).unload(str(call.arguments.get("name", "")))
    return {"unloaded": True}


def _weigh(
    lifecycle: ExecutorLifecycle, engine: ControlledEngine, call: Call
) -> dict[str, object] | None:
    """Has the workers carry out an order about the weights; `version`: of those it ends with."""
    order = order_of(str(call.arguments.get("order", "")))
    number, version = call.number, str(call.arguments.get("version") or "")
    service = engine.service
    if service.asleep and order.action == "push" and not service.keeps_weights:
        return lifecycle.push_asleep(engine, order, version)
    paused = engine.is_still or engine.is_frozen
    can_run = service.has_executor or service.keeps_weights
    check_state(order, can_run=can_run, is_paused=paused)

    def on_done(result: dict[str, object] | HeadraceError) -> None:
        if isinstance(result, HeadraceError):
            reply = Reply(number=number, error=to_wire(result))
        else:
            reply = _reply(number, result)
            if result["num_bytes"]:  # what is cached is of other weights
                _reset_prefix_cache(engine)
                engine.hooks.renew_content()
        engine.output_buffer.add_reply(reply)

    engine.weights.start(order, version, on_done)
    return None


def _name_weights(engine: ControlledEngine, call: Call) -> Document:
    """The version of the weights, or, with a `version`, another name for it."""
    if version := str(call.arguments.get("version") or ""):
        engine.weights.versions.begin(version)
    return {"version": engine.weights.versions.now, "mixed": engine.weights.mixed}


def _reset(engine: ControlledEngine, call: Call) -> Document:
    """Forgets cached prefixes; with `running` the running requests give their blocks back too, and
    are computed again."""
    if call.arguments.get("running") is True:
        engine.put_back_all("the prefix cache was reset under it")
    return _reset_prefix_cache(engine)


def _reset_prefix_cache(engine: ControlledEngine) -> Document:
    engine.kv.reset_cache(engine.scheduler.running())
    return {"reset": True}


def _answer(engine: ControlledEngine, numbers: list[int], result: object) -> None:
    for number in numbers:
        engine.output_buffer.add_reply(_reply(number, result))
    numbers.clear()


def _reply(number: int, result: object) -> Reply:
    return Reply(number=number, result=msgspec.Raw(msgspec.msgpack.encode(result)))
