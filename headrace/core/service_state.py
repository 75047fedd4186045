"""The state of one core as a whole: paused, draining or asleep, the requests in flight, and what it
has counted.

Operations (control.py, lifecycle.py) change `ServiceState` and the engine core obeys it: whether
requests are taken, new ones begin and steps are planned. Requests are found by
engine id, by the ids people know (the server's label and the id the client chose), and by deadline;
one public id may stand for several (`n`, several prompts). `Counters` are raw totals since start,
and the throughput of the last second or two.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from headrace.core.request import Request

MAX_VERSIONS = 64
RETRY_S = 5.0
"""When clients may come back to a core without an executor."""
PROMPT_DIGITS = 7  # shorter than the random part of an id, which might have digits alone
SLACK = 1024  # entries of ended requests that may stay behind
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


class RequestIndex:
    """All accepted requests that have not ended.

    Invariants: `_by_label` has exactly the non-empty labels and external ids of those in `_by_id`,
    `_prompt_tokens` exactly their tenants.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}
        self._by_label: dict[str, dict[int, Request]] = {}
        self._prompt_tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: int) -> Request:
        return self._by_id[request_id]

    def get(self, request_id: int) -> Request | None:
        """The request with this engine id, if it is in flight."""
        return self._by_id.get(request_id)

    def prompt_tokens_of(self, tenant: str) -> int:
        """Prompt tokens of all requests of one tenant."""
        return self._prompt_tokens.get(tenant, 0)

    def add(self, request: Request) -> None:
        """A request has been accepted."""
        self._by_id[request.id] = request
        self._prompt_tokens[request.wire.tenant] += request.num_prompt
        for label in _labels(request):
            self._by_label.setdefault(label, {})[request.id] = request

    def remove(self, request: Request) -> None:
        """The request has ended."""
        del self._by_id[request.id]
        self._prompt_tokens[request.wire.tenant] -= request.num_prompt
        if not self._prompt_tokens[request.wire.tenant]:
            del self._prompt_tokens[request.wire.tenant]
        for label in _labels(request):
            requests = self._by_label[label]
            del requests[request.id]
            if not requests:
                del self._by_label[label]

    def find(self, labels: Iterable[str] | None, *, tenant: str | None = None) -> list[Request]:
        """The requests with these public ids (None: all), of one tenant if one is named. A label
        also finds those of its single prompts, `LABEL-0`, `LABEL-1` and so on."""
        if labels is None:
            matches = self._by_id
        else:
            matches = dict[int, Request]()
            for label in labels:
                matches |= self._by_label.get(label, {})
        return [request for request in matches.values() if tenant in (None, request.wire.tenant)]


def _labels(request: Request) -> set[str]:
    """The public ids of a request; that of several prompts ends in the number of this one."""
    label = request.wire.label
    stem, _, number = label.rpartition("-")
    names = {label, request.wire.external_id}
    if stem and number.isdigit() and len(number) < PROMPT_DIGITS:
        names.add(stem)
    return names - {""}


class Deadlines:
    """Pairs (due, request id). An entry may outlive its request; `expired` may return such ids."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float | None:
        """The earliest deadline."""
        return self._heap[0][0] if self._heap else None

    def add(self, due: float, request_id: int) -> None:
        """Remembers a deadline."""
        heapq.heappush(self._heap, (due, request_id))

    def forget_ended(self, alive: Container[int], *, num_alive: int) -> None:
        """Drops the entries of ended requests once they are most of the heap."""
        if len(self._heap) > 2 * num_alive + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[int]:
        """Takes out the requests whose time is over."""
        ids: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids


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
