"""What the core asks of others. The core declares these protocols and imports none of their implementations.

Executor    runs plans on the workers, in order, without blocking the loop
Gate        a condition outside budget, KV and queues under which a request may not run now, or never
StatsSink   receives one record per step and per finished request
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.base.wire.request import EngineRequest
from headrace.base.wire.step import StepPlan, StepResult, WorkerFacts


class Pending(Protocol):
    """A submitted step."""

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once."""
        ...

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Waits for the step; raises EngineError if the step failed as a whole, TimeoutError after `timeout_s`."""
        ...


class Executor(Protocol):
    """Runs steps. Steps run strictly in the order of submission; `submit` returns without waiting for the device."""

    @property
    def facts(self) -> WorkerFacts:
        """What the loaded workers state."""
        ...

    def submit(self, plan: StepPlan) -> Pending:
        """Queues a step. A failure of an earlier step that is already known raises at once (ENG-14)."""
        ...

    def check(self) -> None:
        """Raises EngineDead if a worker has died."""
        ...

    def close(self) -> None:
        """Ends the workers and frees what they hold; idempotent."""
        ...


class Verdict(msgspec.Struct, frozen=True):
    """A gate's answer: "yes", "not_now" or "never", with the reason people are shown."""

    answer: str
    reason: str = ""


class Gate(Protocol):
    """An optional condition on running a request (LoRA slots, encoder budget, grammar, KV transfer)."""

    name: str

    def admit(self, request: EngineRequest) -> Verdict:
        """Called once when the request arrives: "never" refuses it with the reason."""
        ...

    def ready(self, request_id: int) -> Verdict:
        """Called when the request could be scheduled: "not_now" leaves it in its place in the queue."""
        ...

    def payload(self, request_ids: list[int]) -> bytes | None:
        """What the workers need for this step, None for nothing."""
        ...

    def finish(self, request_id: int) -> None:
        """The request ended, on whatever path; called exactly once per admitted request."""
        ...


class StatsSink(Protocol):
    """Receives counters; must not block."""

    def step(
        self, *, running: int, waiting: int, tokens: int, free_blocks: int, host_s: float
    ) -> None:
        """One scheduled step."""
        ...

    def finished(self, *, reason: str, num_prompt: int, num_output: int, num_cached: int) -> None:
        """One finished request."""
        ...
