"""Other weights, or none for a while, under a core that keeps running: reload, sleep, wake.

All three need a complete pause of mode wait or abort: then nothing runs, and what waits holds
nothing. The executor is closed before the next one is made, so that a device need not hold two
models; if the next one cannot be made, the one before it is made again, and serving goes on as
before. Waiting requests are checked against the new facts. Where that fails too the core has
nothing to run: it refuses everything with the reason until a reload or wake succeeds.

Asleep at level 1 the executor keeps the weights in host memory and has given back everything else;
waking brings them back. At level 2 there is no executor, and waking loads. What cannot be kept, or
brought back, is dropped and loaded.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from headrace.base.errors import (
    Conflict,
    EngineError,
    HeadraceError,
    InvalidRequest,
    StartError,
    Unavailable,
)
from headrace.base.wire.control import Call
from headrace.base.wire.step import RecordedGraphs
from headrace.base.wire.weights import WeightOrder
from headrace.core.ports import Executor, ExecutorSource
from headrace.core.service_state import DROPPED, KEPT, RETRY_S, ServiceState
from headrace.core.weights import Weights

LEVELS = (KEPT, DROPPED)
PARTS = frozenset({"weights", "kv_cache"})
log = logging.getLogger(__name__)


class ExecutorHost(Protocol):
    """What reload, sleep and wake need of the engine core."""

    graphs: RecordedGraphs
    weights: Weights

    @property
    def service(self) -> ServiceState:
        """Pause, drain and sleep."""
        ...

    @property
    def executor(self) -> Executor:
        """The executor installed now."""
        ...

    @property
    def is_still(self) -> bool:
        """Whether nothing runs and nothing can begin."""
        ...

    @property
    def is_frozen(self) -> bool:
        """Whether a pause of mode keep is complete: rows are held, and none of them runs."""
        ...

    def install(self, executor: Executor) -> None:
        """Goes on with another executor while nothing runs."""
        ...

    def put_back_all(self, reason: str) -> None:
        """Takes rows and blocks from all running requests; they wait in their old places."""
        ...

    def refuse_all(self, error: HeadraceError) -> None:
        """Ends everything with this error."""
        ...


def record_graph(host: ExecutorHost) -> bool:
    """While nothing runs: the workers record at most one graph of a step that traffic takes.
    Whether there is another one."""
    if host.service.asleep or host.service.lost:
        return False
    host.graphs = host.executor.record_graph()
    return host.graphs.more


class ExecutorLifecycle:
    """Replaces the executor of a core. `_awaited`: the parts that have not been woken yet."""

    def __init__(self, source: ExecutorSource | None) -> None:
        self._source = source
        self._awaited = PARTS
        self._loaded_before: str | None = None

    def reload(self, host: ExecutorHost, call: Call) -> dict[str, object]:
        """Weights from `model` (a folder or GGUF file; "" for the present ones), of the same
        architecture."""
        model = call.arguments.get("model", "")
        if not isinstance(model, str):
            raise InvalidRequest(f"model is {model!r}, a path is wanted", field="model")
        source = self._source_of(host)
        try:
            source.check(model)
        except StartError as error:
            raise InvalidRequest(f"model: {error.message}", field="model") from None
        host.executor.close()
        try:
            executor = source.make(model)
        except Exception as error:
            _install(host, source)
            if not isinstance(error, StartError):
                raise
            raise InvalidRequest(f"model: {error.message}", field="model") from None
        _install(host, source, executor)
        return {"reloaded": True, "weight_bytes": executor.facts.weight_bytes}

    def sleep(self, host: ExecutorHost, call: Call) -> dict[str, object]:
        """Gives back the KV cache and the device's weights; level 2 keeps none in host memory
        either. The reply has the level reached, which deepens only. Requests that a pause of mode
        keep has frozen go back to the queue, and are computed again after waking: their tokens are
        kept."""
        level: Any = call.arguments.get("level", KEPT)
        if level not in LEVELS:
            raise InvalidRequest(f"level is {level!r}, allowed are 1 and 2", field="level")
        if host.is_frozen:
            host.put_back_all("asleep: its KV blocks were given back")
        source, service = self._source_of(host), host.service
        facts = host.executor.facts
        if level == DROPPED or not _keeps_weights(host):
            host.executor.close()
            level = DROPPED
        service.sleep_level = max(service.sleep_level, level)
        self._awaited = PARTS
        source.rests(facts)
        return {"asleep": True, "level": service.sleep_level}

    def push_asleep(
        self, host: ExecutorHost, order: WeightOrder, version: str
    ) -> dict[str, object]:
        """New weights while the engine sleeps without any: those of a whole checkpoint's folder,
        which waking loads. Other orders are a Conflict."""
        if (order.action, order.way) != ("push", "files") or not order.last:
            raise Conflict("the engine is asleep: wake its weights first, or name a folder")
        source = self._source_of(host)
        try:
            source.check(order.path)
        except StartError as error:
            raise InvalidRequest(
                f"the engine is asleep, and takes whole checkpoints alone: {error.message}",
                field="model_path",
            ) from None
        host.service.sleep_level = DROPPED
        source.turn_to(order.path)
        self._loaded_before = self._loaded_before or host.weights.loads
        return host.weights.turn_to(version)

    def wake(self, host: ExecutorHost, call: Call) -> dict[str, object]:
        """Brings the weights back or loads them, once all `parts` (all of them by default) have
        been called: they come together."""
        parts = call.arguments.get("parts") or sorted(PARTS)
        if not isinstance(parts, list) or not PARTS.issuperset(parts):
            raise InvalidRequest(f"parts is {parts!r}, of {sorted(PARTS)}", field="tags")
        if host.service.has_executor:
            return {"asleep": False, "awaited": []}
        source = self._source_of(host)
        self._awaited = self._awaited.difference(str(part) for part in parts)
        if not self._awaited:
            before, self._loaded_before = self._loaded_before, None
            try:
                _install(host, source, _unparked(host))
            except EngineError:
                if before is not None:  # the next to wake it loads what there was
                    host.weights.turn_to(before)
                raise
        return {"asleep": not host.service.has_executor, "awaited": sorted(self._awaited)}

    def _source_of(self, host: ExecutorHost) -> ExecutorSource:
        """The source; Conflict unless nothing runs and nothing can begin."""
        if self._source is None:
            raise InvalidRequest("this engine cannot change its weights")
        if not host.is_still:
            raise Conflict("pause the engine with mode wait or abort first, and let it complete")
        if reason := host.weights.keeps_executor:
            raise Conflict(reason)
        return self._source


def _keeps_weights(host: ExecutorHost) -> bool:
    """Whether the weights wait in host memory from now on."""
    service = host.service
    if service.lost or service.sleep_level == DROPPED:
        return False
    if service.sleep_level == KEPT:
        return True
    try:
        host.executor.park()
    except Exception:
        log.exception("the weights cannot be kept in host memory: they are dropped")
        return False
    return True


def _unparked(host: ExecutorHost) -> Executor | None:
    """The executor with the weights that it kept, if it did."""
    if host.service.sleep_level != KEPT:
        return None
    executor = host.executor
    try:
        executor.unpark()
    except Exception:
        log.exception("the weights in host memory cannot be brought back: they are loaded")
        executor.close()
        return None
    return executor


def _install(host: ExecutorHost, source: ExecutorSource, executor: Executor | None = None) -> None:
    """Goes on with this executor, else with one like the last; without any, EngineError, and
    everything that waits is refused."""
    service = host.service
    try:
        host.install(executor or source.make(""))
    except Exception as error:
        why = error.message if isinstance(error, HeadraceError) else str(error)
        service.lost = f"the engine has no weights, for they could not be loaded: {why}"
        log.error("%s; reload or wake it", service.lost)
        host.refuse_all(Unavailable(service.lost, retry_after_s=RETRY_S))
        raise EngineError(
            f"{service.lost}; nothing is served until a reload or wake succeeds"
        ) from error
    service.sleep_level = 0
    service.lost = ""
