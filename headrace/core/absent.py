"""The executor of a core that begins asleep: it states what the one before it stated, and runs
nothing."""

from __future__ import annotations

from typing import NoReturn

from headrace.base.errors import EngineDead
from headrace.base.wire.step import RecordedGraphs, StepPlan, WorkerFacts


class AbsentExecutor:
    """Implements `ports.Executor` until another one is made."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts

    def submit(self, plan: StepPlan) -> NoReturn:
        """Nothing is planned while the core is asleep."""
        self.check()

    def send_deferred(self, step: int, payloads: dict[str, memoryview]) -> NoReturn:
        """See `submit`."""
        self.check()

    def profile(self, folder: str | None) -> NoReturn:
        """See `submit`."""
        self.check()

    def log_level(self, level: str) -> None:
        """There is nobody to tell."""

    def record_graph(self) -> RecordedGraphs:
        """There is nothing to record."""
        return RecordedGraphs()

    def park(self) -> None:
        """There is nothing to give back."""

    def unpark(self) -> NoReturn:
        """There is nothing to bring back."""
        self.check()

    def check(self) -> NoReturn:
        """There are no workers."""
        raise EngineDead("the engine is asleep: it has no workers")

    def close(self) -> None:
        """There is nothing to end."""
