"""A closed loop of users in simulated time: what a budget of tokens or a bound on prompts does, without a device.

    python -m benchmarks.h200.simulate --shape qwen3-8b --users 256 [--budget 1792] [--max-slowdown 2]

The real scheduler plans the load of benchmarks/h200/server.py; a step takes what one H200 was measured to take for its
tokens (STEP_MS) and for the KV of its decodes. The host is free, but for TURN_S between an answer and its user's next
prompt, and a size of step that is met for the first or second time costs nothing. `padded` is what the sizes of
recorded steps add to steps with prompts; `new sizes`: how many of these were met for the first time.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.h200.shapes import BYTES_PER_S
from benchmarks.host_cost import make_spec
from headrace.back.executor.null import NullExecutor
from headrace.back.runner.sizes import Buckets
from headrace.base.config.resolved import EngineSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules, TokenBatch
from headrace.base.wire.step import StepPlan, StepResult
from headrace.bench.report import markdown_table
from headrace.core.core import EngineCore

STEP_MS = {
    "qwen3-8b": {
        1: 3.45, 8: 3.6, 32: 4.2, 128: 5.5, 256: 7.4, 512: 13.3, 1024: 25, 2048: 47, 8192: 188,
    },
    "qwen3-0.6b": {
        1: 0.6, 32: 1.08, 64: 1.3, 256: 2.2, 512: 2.8, 1024: 3.7, 2048: 5.8, 4096: 9.9, 8192: 18.2,
    },
}  # fmt: skip
KV_BYTES = {"qwen3-8b": 147_456, "qwen3-0.6b": 114_688}
"""Of one token."""
KV_RATE = {"qwen3-8b": 0.82, "qwen3-0.6b": 0.85}
"""Share of the memory's rate at which decodes read it."""
BUDGET = {"qwen3-8b": 2048, "qwen3-0.6b": 8192}
OUTPUT = 128
ROUNDS = 5
TURN_S = 0.005


class Clock:
    """Simulated seconds."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Step:
    """A step on its way: implements `core.ports.Pending`."""

    clock: Clock
    plan: StepPlan
    due_s: float

    def done(self) -> bool:
        """See Pending."""
        return True

    def result(self, timeout_s: float | None = None) -> StepResult:
        """See Pending: it is over then."""
        self.clock.now_s = max(self.clock.now_s, self.due_s)
        tokens = np.where(self.plan.sample, 5, -1).astype(np.int32)[:, None]
        return StepResult(step=self.plan.step, tokens=tokens)


class Device(NullExecutor):
    """Steps one after another, each as long as the shape's."""

    def __init__(self, spec: EngineSpec, shape: str, clock: Clock) -> None:
        super().__init__(spec)
        self._shape, self._clock, self._free_s = shape, clock, 0.0
        self.steps: list[tuple[float, int, int]] = []
        """When it was submitted, its tokens, its rows."""

    def submit(self, plan: StepPlan) -> Step:
        """See Executor."""
        decodes = plan.num_tokens == 1
        context = int((plan.num_computed + plan.num_tokens)[decodes].sum())
        known, tokens = STEP_MS[self._shape], int(plan.num_tokens.sum())
        seconds = float(np.interp(tokens, list(known), list(known.values()))) / 1e3
        seconds += context * KV_BYTES[self._shape] / (BYTES_PER_S * KV_RATE[self._shape])
        self._free_s = max(self._clock.now_s, self._free_s) + seconds
        self.steps.append((self._clock.now_s, tokens, len(plan.rows)))
        return Step(self._clock, plan, self._free_s)


class Loop:
    """So many users, each with its next prompt as soon as it has its answer."""

    def __init__(self, core: EngineCore, clock: Clock, users: int) -> None:
        self._core, self._clock, self._users = core, clock, users
        self._random = np.random.default_rng(0)
        self._due: list[tuple[float, int]] = []
        self._next = self._ended = 0
        self.asked: dict[int, float] = {}
        self.times: dict[int, list[float]] = {}

    def run(self, requests: int) -> None:
        """All of them, to the last answer."""
        end = self._next + requests
        for _ in range(self._users):
            self._ask(self._clock.now_s)
        while self._ended < end:
            if not self._core.has_work:
                self._clock.now_s = max(self._clock.now_s, self._due[0][0])
            while self._due and self._due[0][0] <= self._clock.now_s:
                self._send(*heapq.heappop(self._due))
            if (batch := self._core.step(wait=True).tokens) is not None:
                self._read(batch, end)

    def _ask(self, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, self._next))
        self._next += 1

    def _send(self, due_s: float, number: int) -> None:
        self.asked[number] = due_s
        prompt = np.full(int(self._random.integers(512, 1537)), 7, np.int32).tobytes()
        stop = StopRules(max_tokens=OUTPUT, stop_ids=())
        sampling = RowSampling(temperature=0.0)
        self._core.add(EngineRequest(id=number, prompt=prompt, stop=stop, sampling=sampling))

    def _read(self, batch: TokenBatch, end: int) -> None:
        for number in batch.ids.tolist():
            self.times.setdefault(number, []).append(self._clock.now_s)
        for _ in batch.finished:
            self._ended += 1
            if self._next < end:
                self._ask(self._clock.now_s + TURN_S)


def simulate(shape: str, users: int, budget: int, max_slowdown: float | None) -> list[object]:
    """A row of the table; one round before it is not counted, as in the measurement."""
    spec = make_spec(running=256, context=1536, steps=200)
    scheduler = SchedulerSpec(
        max_step_tokens=budget,
        max_running=256,
        max_decode_slowdown=max_slowdown,
    )
    kv = msgspec.structs.replace(spec.kv, prefix_caching=False, num_blocks=40_000)
    spec = msgspec.structs.replace(spec, scheduler=scheduler, kv=kv)
    clock = Clock()
    device = Device(spec, shape, clock)
    loop = Loop(EngineCore(spec, device, clock=clock), clock, users)
    loop.run(users)
    began_s, met = clock.now_s, users
    loop.run(users * ROUNDS)
    token_times = [times for number, times in loop.times.items() if number >= met]
    first = [loop.times[number][0] - asked for number, asked in loop.asked.items() if number >= met]
    gaps = 1e3 * np.concatenate([np.diff(times) for times in token_times])
    sizes = Buckets(max_rows=256, max_tokens=budget, groups=1)
    mixed = [(s, t, sizes.of(tokens=t, rows=r)) for s, t, r in device.steps if t > r]
    seen, new = set(), 0
    for submitted_s, _, bucket in mixed:
        new += bucket not in seen and submitted_s >= began_s
        seen.add(bucket)
    padded = sum(bucket.tokens for _, _, bucket in mixed) / sum(t for _, t, _ in mixed) - 1
    rate = users * ROUNDS * OUTPUT / (clock.now_s - began_s)
    return [
        *(shape, users, budget, max_slowdown or "none", f"{rate:,.0f}"),
        f"{1e3 * np.median(first):.0f}",
        f"{np.median(gaps):.1f} / {np.percentile(gaps, 99):.1f}",
        *(f"{100 * padded:.1f} %", new),
    ]


def main() -> None:
    """Prints one row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--users", default="256", help="such as 16,64,256")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--max-slowdown", type=float)
    given = parser.parse_args()
    budget = given.budget or BUDGET[given.shape]
    header = ("shape", "users", "budget", "max_slowdown", "out tok/s", "TTFT p50 ms")
    rows = [
        simulate(given.shape, int(users), budget, given.max_slowdown)
        for users in given.users.split(",")
    ]
    print(markdown_table([*header, "ITL p50 / p99 ms", "padded", "new sizes"], rows))


if __name__ == "__main__":
    main()
