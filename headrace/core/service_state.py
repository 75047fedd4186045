"""The state of one core as a whole: paused, draining or asleep, and what it has counted.

Operations (control.py, lifecycle.py) change `ServiceState` and the engine core obeys it: whether
requests are taken, new ones begin and steps are planned. `Counters` are raw totals since start, and
the throughput of the last second or two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

MAX_VERSIONS = 64
KEPT, DROPPED = 1, 2
"""Levels of sleep: the weights wait in host memory, or there is no executor at all."""


class PauseMode(Enum):
    """How a pause treats running requests: ends them, lets them finish, or freezes them."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class WeightVersions:
    """The versions of a core's weights, with when each began; the last MAX_VERSIONS are remembered.
    `now`: that of the present ones, "" where nobody has named one."""

    def __init__(self, first: str, clock: Callable[[], float]) -> None:
        self.now = first
        self._clock = clock
        self._begun: deque[tuple[float, str]] = deque([(clock(), first)], MAX_VERSIONS)

    def begin(self, version: str) -> None:
        """The weights are of this version from now on."""
        self.now = version
        self._begun.append((self._clock(), version))

    def since(self, then: float) -> str:
        """Those that there were since then, in order, with commas between them."""
        if self._begun[-1][0] <= then:
            return self.now
        later = [version for at, version in self._begun if at > then]
        before = [version for at, version in self._begun if at <= then]
        return ",".join([*before[-1:], *later])


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
    def trouble(self) -> str:
        """Why no request is taken, or ""."""
        return self.lost or ("the engine core is draining" if self.draining else "")

    @property
    def mode(self) -> str | None:
        """The mode of the pause; None if there is none."""
        return None if self.pause is None else self.pause.value

    @property
    def asleep(self) -> bool:
        """Whether the core sleeps, at whichever level."""
        return self.sleep_level > 0

    @property
    def held(self) -> str:
        """Why a healthy core answers nothing: "asleep", "paused", or "" where it does."""
        return "asleep" if self.asleep else "paused" if self.pause is not None else ""

    @property
    def has_executor(self) -> bool:
        """Whether there is an executor that can run steps or be asked."""
        return not (self.sleep_level or self.lost)

    @property
    def keeps_weights(self) -> bool:
        """Whether a sleeping core's workers are there, and their weights can be asked for."""
        return self.sleep_level == KEPT and not self.lost

    @property
    def admits(self) -> bool:
        """Whether requests that have never run may begin."""
        return self.pause is None

    @property
    def frozen(self) -> bool:
        """Whether nothing may be planned."""
        return self.pause is PauseMode.KEEP or not self.has_executor


RATE_WINDOW_S = 1.0
FORGET = 0.95  # share of its weight that a request keeps at the end of the next one
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Greatest step of each bucket but the last, which has no bound."""


class _Mean:
    """The mean of the last values, the newest weighing most."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._sum = FORGET * self._sum + value
        self._weight = FORGET * self._weight + 1.0

    @property
    def value(self) -> float:
        """The mean; 0 before the first value."""
        return self._sum / self._weight if self._weight else 0.0


@dataclass(eq=False, slots=True)
class TransferCounts:
    """Since start: KV of prompts that went to other servers and came from them, in transfers and
    tokens, and transfers of either way that did not; tokens whose KV went to the store and came
    from it."""

    sent: int = 0
    sent_tokens: int = 0
    received: int = 0
    received_tokens: int = 0
    failed: int = 0
    stored_tokens: int = 0
    restored_tokens: int = 0


class Counters:
    """Totals; `rate` is tokens (prompt and output) per second, smoothed over about RATE_WINDOW_S.
    `step_tokens`: steps by their tokens, a count for each bucket of STEP_TOKENS."""

    def __init__(self, now: float) -> None:
        self.steps = 0
        self.rows = 0
        self.tokens = 0
        self.output_tokens = 0
        self.jump_forward_tokens = 0
        self.failed_steps = 0
        self.failed_in_a_row = 0
        self.refused = 0
        self.finished: Counter[str] = Counter()
        self.plan_s = 0.0
        self.update_s = 0.0
        self.rate = 0.0
        self.step_tokens = [0] * (len(STEP_TOKENS) + 1)
        self.transfers = TransferCounts()
        self.prompt_tokens = _Mean()
        self.computed_tokens = _Mean()
        self.output_tokens_each = _Mean()
        self._window_start = now
        self._window_tokens = 0

    def ended(self, reason: str, *, num_prompt: int, num_cached: int, num_output: int) -> None:
        """A request has ended. Those that did their work tell what requests are like lately."""
        self.finished[reason] += 1
        if reason not in ("error", "abort"):
            self.prompt_tokens.add(num_prompt)
            self.computed_tokens.add(num_prompt - num_cached)
            self.output_tokens_each.add(num_output)

    def finished_step(self, tokens: int, *, any_failed: bool) -> None:
        """A step gave so many tokens. One in which rows failed and none gave a token counts as
        failed; `failed_in_a_row` counts those since the last token."""
        self.output_tokens += tokens
        if tokens:
            self.failed_in_a_row = 0
        elif any_failed:
            self.failed_steps += 1
            self.failed_in_a_row += 1

    def planned(self, now: float, *, rows: int, tokens: int) -> None:
        """A step was planned."""
        self.steps += 1
        self.rows += rows
        self.tokens += tokens
        self.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        self._window_tokens += tokens
        length = now - self._window_start
        if length >= RATE_WINDOW_S:
            latest = self._window_tokens / length
            self.rate = latest if self.rate == 0.0 else 0.5 * (self.rate + latest)
            self._window_start, self._window_tokens = now, 0
