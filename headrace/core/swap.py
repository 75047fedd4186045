"""Other weights, or none for a while, under a core that goes on: reload, sleep, wake (API-20).

All three need a complete pause of mode wait or abort: then nothing runs, and what waits holds nothing. The executor is
closed before the next one is made, so that a device need not hold two models; if the next one cannot be made, the one
before it is made again, and serving goes on as before. What waits is checked against the new facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.errors import Conflict, InvalidRequest, StartError
from headrace.base.wire.request import Call
from headrace.core.ports import ExecutorSource

if TYPE_CHECKING:
    from headrace.core.core import EngineCore

LEVELS = (1, 2)


class Swap:
    """`asleep`: there is no executor now; nothing may be planned."""

    def __init__(self, core: EngineCore, source: ExecutorSource | None) -> None:
        self._core = core
        self._source = source
        self.asleep = False

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
            self._core.install(source.make(""))
            if not isinstance(error, StartError):
                raise
            raise InvalidRequest(f"model: {error.message}", field="model") from None
        self._core.install(executor)
        self.asleep = False
        return {"reloaded": True, "weight_bytes": executor.facts.weight_bytes}

    def sleep(self, call: Call) -> dict[str, object]:
        """Gives back what the executor holds on the device and the host, weights and KV cache alike."""
        level = call.arguments.get("level", 1)
        if level not in LEVELS:
            raise InvalidRequest(f"level is {level!r}, allowed are 1 and 2", field="level")
        self._ready()
        if not self.asleep:
            self._core.executor.close()
            self.asleep = True
        return {"asleep": True}

    def wake(self, call: Call) -> dict[str, object]:
        """Loads the weights again."""
        source = self._ready()
        if self.asleep:
            self._core.install(source.make(""))
            self.asleep = False
        return {"asleep": False}

    def _ready(self) -> ExecutorSource:
        """The source; Conflict unless nothing runs and nothing can begin."""
        if self._source is None:
            raise InvalidRequest("this engine cannot change its weights")
        if not self._core.control.is_still:
            raise Conflict("pause the engine with mode wait or abort first, and let it complete")
        return self._source
