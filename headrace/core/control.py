"""Control calls: status, explain, metrics, pause and resume, drain, reset of the prefix cache.

A pause or a drain is answered only once it is complete (ENG-15, ENG-16): `advance` looks after every step whether it
is. Pause modes: `abort` ends everything now; `wait` lets what runs finish; `keep` freezes everything as it is. New
requests are held meanwhile, not refused; while draining they are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from headrace.base.errors import Conflict, InvalidRequest, Unavailable, to_wire
from headrace.base.telemetry import log as logs
from headrace.base.wire.request import Call, Reply
from headrace.core.admission import retry_after_s
from headrace.core.counters import STEP_TOKENS
from headrace.core.request import Request
from headrace.core.swap import RETRY_S

if TYPE_CHECKING:
    from headrace.core.core import EngineCore

Document = dict[str, object]


class Pause(Enum):
    """How a pause treats what is there."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Control:
    """The control plane of one core. `_waiting_pause` holds the numbers of calls whose pause is not complete."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.pause: Pause | None = None
        self.drain_due: float | None = None
        self.draining = False
        self._clear_cache = False
        self._waiting_pause: list[int] = []
        self._waiting_drain: list[int] = []
        self._drain_aborted = 0
        self.log_level = ""
        self._operations: dict[str, Callable[[Call], object]] = {
            "status": lambda call: self._status(),
            "explain": self._explain,
            "metrics": lambda call: self._metrics(),
            "is_paused": lambda call: {"paused": self.pause is not None, "mode": self.mode},
            "pause": self._pause,
            "resume": lambda call: self._resume(),
            "drain": self._drain,
            "reset_prefix_cache": self._reset,
            "abort": self._abort,
            "log_level": self._set_log_level,
            "profile": self._profile,
            "reload": core.swap.reload,
            "sleep": core.swap.sleep,
            "wake": core.swap.wake,
        }

    @property
    def frozen(self) -> bool:
        """Whether nothing may be planned."""
        return self.pause is Pause.KEEP or self._core.swap.level > 0 or bool(self._core.swap.lost)

    def check_open(self) -> None:
        """Unavailable where no request is taken: while draining, and without weights."""
        if self.draining or self._core.swap.lost:
            raise self._closed()

    def _closed(self) -> Unavailable:
        core = self._core
        if core.swap.lost:
            return Unavailable(core.swap.lost, retry_after_s=RETRY_S)
        wait = retry_after_s(core.scheduler.queue.num_tokens, core.counters.rate)
        return Unavailable("the engine is draining", retry_after_s=wait)

    @property
    def is_still(self) -> bool:
        """Whether nothing runs and nothing can begin: a pause of mode wait or abort is complete, or one of mode keep
        whose requests have gone back to the queue."""
        if self.pause is Pause.KEEP and self._core.scheduler.num_running:
            return False
        return self.pause is not None and self._pause_is_complete()

    @property
    def is_frozen(self) -> bool:
        """Whether a pause of mode keep is complete: rows are held, and none of them runs."""
        return self.pause is Pause.KEEP and self._pause_is_complete()

    def call(self, call: Call) -> Reply | None:
        """Runs an operation; None if its reply comes later. A bad call is answered with an error."""
        operation = self._operations.get(call.operation)
        try:
            if operation is None:
                known = ", ".join(sorted(self._operations))
                raise InvalidRequest(
                    f"unknown operation {call.operation!r} (known: {known})", field="operation"
                )
            result = operation(call)
        except Exception as error:
            return Reply(number=call.number, error=to_wire(error))
        if result is None:
            self.advance()
            return None
        return _reply(call.number, result)

    def advance(self) -> None:
        """Answers the pauses and drains that have become complete."""
        if self._waiting_pause and self._pause_is_complete():
            if self._clear_cache:
                self._reset_prefix_cache()
            self._answer(self._waiting_pause, {"paused": True, "mode": self.mode})
        if self.draining:
            self._advance_drain()

    # pause and resume

    def _pause(self, call: Call) -> None:
        mode = call.arguments.get("mode", "wait")
        if mode not in {pause.value for pause in Pause}:
            raise InvalidRequest(
                f"mode is {mode!r}, allowed are abort, wait and keep", field="mode"
            )
        clear = call.arguments.get("clear_cache", False)
        if not isinstance(clear, bool):
            raise InvalidRequest(
                f"clear_cache is {clear!r}, true or false is allowed", field="clear_cache"
            )
        if mode == Pause.WAIT.value and self._core.swap.is_empty and self._begun():
            raise Conflict("the engine is asleep, and requests that have begun wait: wake it first")
        self.pause = Pause(mode)
        self._clear_cache = clear and self.pause is not Pause.KEEP
        self._core.scheduler.admit_new = False
        if self.pause is Pause.ABORT:
            self._core.abort(list(self._core.requests))
        self._waiting_pause.append(call.number)

    def _pause_is_complete(self) -> bool:
        core = self._core
        if core.num_in_flight:
            return False
        if self.pause is Pause.WAIT:
            return core.scheduler.num_running == 0 and not self._begun()
        return True

    def _begun(self) -> bool:
        """Whether a request waits that has run before."""
        return any(request.scheduled_at is not None for request in self._core.scheduler.queue)

    def _resume(self) -> Document:
        if self._core.swap.asleep:
            raise Conflict("the engine is asleep: wake it first")
        self.pause = None
        self._core.scheduler.admit_new = True
        early = to_wire(Conflict("resumed before the pause was complete"))
        for number in self._waiting_pause:
            self._core.outbox.add_reply(Reply(number=number, error=early))
        self._waiting_pause.clear()
        return {"paused": False, "mode": None}

    def begin_paused(self, mode: str) -> None:
        """As a core that died while it was paused goes on."""
        self.pause = Pause(mode)
        self._core.scheduler.admit_new = False

    @property
    def mode(self) -> str | None:
        """How it is paused; None if it is not."""
        return None if self.pause is None else self.pause.value

    # drain

    def _drain(self, call: Call) -> None:
        timeout_s = call.arguments.get("timeout_s", 0.0)
        if (
            isinstance(timeout_s, bool)
            or not isinstance(timeout_s, int | float)
            or not timeout_s >= 0
        ):
            raise InvalidRequest(
                f"timeout_s is {timeout_s!r}, at least 0 is allowed", field="timeout_s"
            )
        due = self._core.clock() + timeout_s
        self.draining = True
        if math.isfinite(due):
            self.drain_due = due if self.drain_due is None else min(due, self.drain_due)
        self._waiting_drain.append(call.number)

    def _advance_drain(self) -> None:
        core = self._core
        if self.drain_due is not None and core.clock() >= self.drain_due:
            self.drain_due = None
            over = to_wire(
                Unavailable(
                    "the server shuts down and the time to finish is over", retry_after_s=1.0
                )
            )
            self._drain_aborted = len(core.requests)
            for request in list(core.requests.values()):
                core.end(request, "error", error=over)
        if self._waiting_drain and not core.requests and not core.num_in_flight:
            self.drain_due = None
            aborted = self._drain_aborted
            self._answer(self._waiting_drain, {"completed": aborted == 0, "aborted": aborted})

    def _answer(self, numbers: list[int], result: object) -> None:
        for number in numbers:
            self._core.outbox.add_reply(_reply(number, result))
        numbers.clear()

    def _profile(self, call: Call) -> Document:
        """Starts (`folder`) or stops (no folder) a trace of the workers' steps."""
        folder = call.arguments.get("folder")
        if folder is not None and not isinstance(folder, str):
            raise InvalidRequest(f"folder is {folder!r}, a path is wanted", field="folder")
        if self._core.swap.is_empty:
            raise Conflict("the engine is asleep: wake it first")
        return {"places": self._core.executor.profile(folder)}

    def _abort(self, call: Call) -> Document:
        """Ends the requests with these public ids (all: none given), of one tenant if one is named."""
        labels, tenant = call.arguments.get("labels"), call.arguments.get("tenant")
        if labels is not None and not isinstance(labels, list):
            raise InvalidRequest(f"labels is {labels!r}, a list of ids is wanted", field="labels")
        found = [
            request.id
            for request in self._core.requests.values()
            if tenant in (None, request.wire.tenant)
            and (labels is None or any(_is_of(request.wire.label, str(one)) for one in labels))
        ]
        self._core.abort(found)
        return {"aborted": len(found)}

    def _set_log_level(self, call: Call) -> Document:
        """Of this process and its workers; fronts hear of it in the next Hello."""
        level = str(call.arguments.get("level"))
        if level not in logs.LEVELS:
            raise InvalidRequest(f"level is {level!r}, allowed are {', '.join(logs.LEVELS)}")
        logs.set_level(level)
        if not self._core.swap.is_empty:
            self._core.executor.log_level(level)
        self.log_level = level
        return {"level": level}

    # reports

    def _reset(self, call: Call) -> Document:
        """Forgets cached prefixes; with `running` what runs gives its blocks back too, and is computed again."""
        if call.arguments.get("running") is True:
            self._core.scheduler.put_back_all("the prefix cache was reset under it")
        return self._reset_prefix_cache()

    def _reset_prefix_cache(self) -> Document:
        self._core.kv.reset_cache(self._core.scheduler.running())
        return {"reset": True}

    def _explain(self, call: Call) -> Document:
        ids = call.arguments.get("ids", [])
        if not isinstance(ids, list):
            raise InvalidRequest(f"ids is {ids!r}, a list of request ids is wanted", field="ids")
        requests = self._core.requests
        return {str(i): self._explain_one(requests[i]) for i in ids if i in requests}

    def _explain_one(self, request: Request) -> Document:
        core, now = self._core, self._core.clock()
        waits = request.row < 0
        return {
            "label": request.wire.label,
            "state": request.state.value,
            "reason": self._reason(request),
            "position": core.scheduler.queue.position(request) if waits else None,
            "since_s": now - request.since,
            "age_s": now - request.arrived_at,
            "num_prompt": request.num_prompt,
            "num_output": core.rows.num_known(request) - request.num_prompt,
            "num_cached": request.num_cached,
            "num_preemptions": request.num_preemptions,
            "steps_passed_over": request.passed_over,
            "kv_blocks": sum(block != 0 for blocks in request.blocks for block in blocks),
        }

    def _reason(self, request: Request) -> str:
        """Why it waits, or what it does. The scheduler notes what it found; what holds for all is said here."""
        core = self._core
        if self.frozen:
            return "paused: keep"
        if request.row >= 0:
            return request.reason
        if self.pause is not None and request.scheduled_at is None:
            return f"paused: {self.pause.value}"
        if not core.rows.num_free:
            return f"rows: all {core.rows.num_rows} are taken (max_running)"
        if request.reason == "new":
            return "budget: the step had no tokens left for its prompt"
        return request.reason

    def _waiting_by_reason(self) -> dict[str, int]:
        queue = self._core.scheduler.queue
        return dict(Counter(self._reason(request).partition(":")[0] for request in queue))

    def _waiting_by_tenant(self) -> dict[str, int]:
        """By the beginning of the tenant's digest: enough to tell them apart."""
        queue = self._core.scheduler.queue
        return dict(Counter(request.wire.tenant[:8] or "no key" for request in queue))

    def _status(self) -> Document:
        """The ledger of a server at rest: everything that could leak, in numbers."""
        core = self._core
        pool, scheduler = core.kv.pool, core.scheduler
        return {
            "running": scheduler.num_running,
            "waiting": len(scheduler.queue),
            "waiting_tokens": scheduler.queue.num_tokens,
            "waiting_by_reason": self._waiting_by_reason(),
            "waiting_by_tenant": self._waiting_by_tenant(),
            "in_flight_steps": core.num_in_flight,
            "free_blocks": pool.num_free,
            "cached_blocks": pool.num_cached,
            "total_blocks": pool.num_usable,
            "block_tokens": core.kv.block_tokens,
            "held_blocks": pool.num_usable - pool.num_free,
            "refcount_sum": pool.refcount_sum(),
            "free_rows": core.rows.num_free,
            "total_rows": core.rows.num_rows,
            "capacity_tokens": core.kv.capacity_tokens,
            "paused": self.mode,
            "draining": self.draining,
            "asleep": self._core.swap.asleep,
            "sleep_level": self._core.swap.level,
            "tokens_per_s": core.counters.rate,
            **self._metrics(),
        }

    def _metrics(self) -> Document:
        core = self._core
        counters, kv = core.counters, core.kv
        return {
            "steps": counters.steps,
            "rows": counters.rows,
            "tokens": counters.tokens,
            "output_tokens": counters.output_tokens,
            "jumped_tokens": counters.jumped_tokens,
            "preemptions": core.scheduler.num_preemptions,
            "prefix_query_tokens": kv.num_queries,
            "prefix_hit_tokens": kv.num_hits,
            "evictions": kv.pool.num_evictions,
            "refused": counters.refused,
            "held_by_gates": core.gates.num_held,
            "finished": dict(counters.finished),
            "step_tokens": _by_bound(counters.step_tokens),
            "plan_s": counters.plan_s,
            "land_s": counters.land_s,
        }


def _by_bound(counts: list[int]) -> dict[str, int]:
    """Greatest value of a bucket -> count."""
    return dict(zip([*map(str, STEP_TOKENS), "inf"], counts, strict=True))


def _is_of(label: str, asked: str) -> bool:
    """Whether a request's label is this public id, or that of one of its several prompts."""
    return label == asked or label.startswith(asked + "-")


def _reply(number: int, result: object) -> Reply:
    return Reply(number=number, result=msgspec.Raw(msgspec.msgpack.encode(result)))
