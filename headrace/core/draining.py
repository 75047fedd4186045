"""How a core drains: it takes no new request, and what it has may finish; then it may be ended."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from headrace.base.errors import Conflict, InvalidRequest, Unavailable, to_wire
from headrace.base.wire.control import Call, Reply
from headrace.core.output_processor import OutputBuffer
from headrace.core.reports import EngineView
from headrace.core.service_state import RequestIndex


class DrainedEngine(EngineView, Protocol):
    """What a drain asks of the engine core."""

    @property
    def requests(self) -> RequestIndex:
        """The requests in flight."""
        ...

    @property
    def output_buffer(self) -> OutputBuffer:
        """Where replies go that come later than their call."""
        ...

    def clock(self) -> float:
        """Now, in seconds."""
        ...

    def refuse_all(self, error: Unavailable) -> None:
        """Ends every request with this error."""
        ...


class Drain:
    """The drain of one core. `_waiting`: the numbers of calls that are answered once it is
    complete."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._aborted = 0

    def begin(self, engine: DrainedEngine, call: Call) -> None:
        """Refuses new requests; what is there after `timeout_s` (infinite: never) is ended."""
        timeout_s = call.arguments.get("timeout_s", 0.0)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            timeout_s = math.nan
        if not timeout_s >= 0:
            value = call.arguments.get("timeout_s")
            raise InvalidRequest(
                f"timeout_s is {value!r}, at least 0 is allowed", field="timeout_s"
            )
        service = engine.service
        due = engine.clock() + timeout_s
        service.draining = True
        if math.isfinite(due):
            service.drain_due = due if service.drain_due is None else min(due, service.drain_due)
        self._waiting.append(call.number)

    def undo(self, engine: DrainedEngine, call: Call) -> dict[str, object]:
        """Takes requests again; calls that wait for the drain are answered with a Conflict."""
        engine.service.draining, engine.service.drain_due = False, None
        error = to_wire(Conflict("the drain was undone before it was complete"))
        for number in self._waiting:
            engine.output_buffer.add_reply(Reply(number=number, error=error))
        self._waiting.clear()
        return {"draining": False}

    def advance(self, engine: DrainedEngine) -> None:
        """Ends what is late; answers once nothing is left."""
        service = engine.service
        if service.drain_due is not None and engine.clock() >= service.drain_due:
            service.drain_due = None
            self._aborted = len(engine.requests)
            over = "the server shuts down and the time to finish is over"
            engine.refuse_all(Unavailable(over, retry_after_s=1.0))
        if not self._waiting or engine.requests or engine.num_in_flight:
            return
        service.drain_due = None
        result = {"completed": self._aborted == 0, "aborted": self._aborted}
        raw = msgspec.Raw(msgspec.msgpack.encode(result))
        for number in self._waiting:
            engine.output_buffer.add_reply(Reply(number=number, result=raw))
        self._waiting.clear()
