"""Whether requests are taken, new ones begin and steps are planned: pause, drain and sleep of one
core, as plain state. Operations (control.py, lifecycle.py) change it, the engine core obeys it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

KEPT, DROPPED = 1, 2
"""Levels of sleep: the weights wait in host memory, or there is no executor at all."""


class PauseMode(Enum):
    """How a pause treats running requests: ends them, lets them finish, or freezes them."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(eq=False)
class ServiceState:
    """`sleep_level`: 0 awake, else KEPT or DROPPED. `lost`: why there is no executor against our
    will, or "". `drain_due`: when the time to finish is over, on the core's clock. `log_level`: the
    last one an administrator set, or ""."""

    pause: PauseMode | None = None
    draining: bool = False
    drain_due: float | None = None
    sleep_level: int = 0
    lost: str = ""
    log_level: str = ""

    @classmethod
    def resumed(cls, *, paused: str | None, asleep: bool) -> ServiceState:
        """The state in which a restarted core goes on: paused in this mode (none or "":
        it is not), and asleep without an executor, as what was kept in host memory is gone."""
        pause = PauseMode(paused) if paused else None
        return cls(pause=pause, sleep_level=DROPPED if asleep else 0)

    @property
    def mode(self) -> str | None:
        """The mode of the pause; None if there is none."""
        return None if self.pause is None else self.pause.value

    @property
    def asleep(self) -> bool:
        """Whether the core sleeps, at whichever level."""
        return self.sleep_level > 0

    @property
    def has_executor(self) -> bool:
        """Whether there is an executor that can run steps or be asked."""
        return not (self.sleep_level or self.lost)

    @property
    def admits(self) -> bool:
        """Whether requests that have never run may begin."""
        return self.pause is None

    @property
    def frozen(self) -> bool:
        """Whether nothing may be planned."""
        return self.pause is PauseMode.KEEP or not self.has_executor
