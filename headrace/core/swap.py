"""Other weights, or none for a while, under a core that goes on: reload, sleep, wake (API-20).

All three need a complete pause of mode wait or abort: then nothing runs, and what waits holds nothing. The executor is
closed before the next one is made, so that a device need not hold two models; if the next one cannot be made, the one
before it is made again, and serving goes on as before. What waits is checked against the new facts. Where that fails
too the core has nothing to run: it refuses everything with the reason until a reload or wake succeeds.

Asleep at level 1 the executor keeps the weights in host memory and has given back everything else; waking brings them
back. At level 2 there is no executor, and waking loads. What cannot be kept, or brought back, is dropped and loaded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from headrace.base.errors import (
    Conflict,
    EngineError,
    HeadraceError,
    InvalidRequest,
    StartError,
    Unavailable,
)
from headrace.base.wire.request import Call
from headrace.core.ports import Executor, ExecutorSource

if TYPE_CHECKING:
    from headrace.core.core import EngineCore

LEVELS = (1, 2)
KEPT, DROPPED = LEVELS
PARTS = frozenset({"weights", "kv_cache"})
RETRY_S = 5.0
log = logging.getLogger(__name__)


class Swap:
    """`level`: how deeply the core sleeps, 0 when it is awake; asleep nothing may be planned. `lost`: why there is no
    executor against our will, or ""."""

    def __init__(self, core: EngineCore, source: ExecutorSource | None) -> None:
        self._core = core
        self._source = source
        self.level = 0
        self.lost = ""
        self._awaited = PARTS

    @property
    def asleep(self) -> bool:
        """Whether it sleeps, at whichever level."""
        return self.level > 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no executor now that could run or be asked."""
        return self.asleep or bool(self.lost)

    def begin_asleep(self) -> None:
        """As a core that died asleep goes on: what it kept in host memory went with it."""
        self.level = DROPPED

    def reload(self, call: Call) -> dict[str, object]:
        """Weights from `model` (a folder or GGUF file; "" for the present ones), of the same architecture."""
        model = call.arguments.get("model", "")
        if not isinstance(model, str):
            raise InvalidRequest(f"model is {model!r}, a path is wanted", field="model")
        source = self._ready()
        try:
            source.check(model)
        except StartError as error:
            raise InvalidRequest(f"model: {error.message}", field="model") from None
        self._core.executor.close()
        try:
            executor = source.make(model)
        except Exception as error:
            self._install(source)
            if not isinstance(error, StartError):
                raise
            raise InvalidRequest(f"model: {error.message}", field="model") from None
        self._install(source, executor)
        return {"reloaded": True, "weight_bytes": executor.facts.weight_bytes}

    def sleep(self, call: Call) -> dict[str, object]:
        """Gives back the KV cache and the device's weights; level 2 keeps none in host memory either. The reply tells
        the level that it is, which deepens only. What a pause of mode keep has frozen goes back to the queue, and is
        computed again after waking: its tokens are kept."""
        level: Any = call.arguments.get("level", 1)
        if level not in LEVELS:
            raise InvalidRequest(f"level is {level!r}, allowed are 1 and 2", field="level")
        if self._core.control.is_frozen:
            self._core.scheduler.put_back_all("asleep: its KV blocks were given back")
        source, facts = self._ready(), self._core.executor.facts
        if level == DROPPED or self.lost or not (self.level == KEPT or self._park()):
            self._core.executor.close()
            level = DROPPED
        self.level, self._awaited = max(self.level, level), PARTS
        source.rests(facts)
        return {"asleep": True, "level": self.level}

    def _park(self) -> bool:
        """Whether the executor keeps the weights."""
        if self.level == DROPPED:
            return False
        try:
            self._core.executor.park()
        except Exception:
            log.exception("the weights cannot be kept in host memory: they are dropped")
            return False
        return True

    def wake(self, call: Call) -> dict[str, object]:
        """Brings the weights back or loads them, once all `parts` (all of them by default) have been called: they come
        together."""
        parts = call.arguments.get("parts") or sorted(PARTS)
        if not isinstance(parts, list) or not PARTS.issuperset(parts):
            raise InvalidRequest(f"parts is {parts!r}, of {sorted(PARTS)}", field="tags")
        if not self.is_empty:
            return {"asleep": False, "awaited": []}
        source = self._ready()
        self._awaited = self._awaited.difference(str(part) for part in parts)
        if not self._awaited:
            self._install(source, self._unparked())
        return {"asleep": self.is_empty, "awaited": sorted(self._awaited)}

    def _unparked(self) -> Executor | None:
        """The executor with the weights that it kept, if it did."""
        if self.level != KEPT:
            return None
        executor = self._core.executor
        try:
            executor.unpark()
        except Exception:
            log.exception("the weights in host memory cannot be brought back: they are loaded")
            executor.close()
            return None
        return executor

    def _install(self, source: ExecutorSource, executor: Executor | None = None) -> None:
        """Goes on with this executor, else with one like the last; without any, EngineError, and everything that waits
        is refused."""
        try:
            self._core.install(executor or source.make(""))
        except Exception as error:
            why = error.message if isinstance(error, HeadraceError) else str(error)
            self.lost = f"the engine has no weights, for they could not be loaded: {why}"
            log.error("%s; reload or wake it", self.lost)
            self._core.refuse_all(Unavailable(self.lost, retry_after_s=RETRY_S))
            raise EngineError(
                f"{self.lost}; nothing is served until a reload or wake succeeds"
            ) from error
        self.level, self.lost = 0, ""

    def _ready(self) -> ExecutorSource:
        """The source; Conflict unless nothing runs and nothing can begin."""
        if self._source is None:
            raise InvalidRequest("this engine cannot change its weights")
        if not self._core.control.is_still:
            raise Conflict("pause the engine with mode wait or abort first, and let it complete")
        return self._source
