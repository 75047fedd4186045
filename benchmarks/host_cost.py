"""Host cost of one step: planning it and taking in its result, in microseconds, on the null executor.

    python -m benchmarks.host_cost [--steps N] [--write] [--shares]

Measured in steady decode with prefix caching on (full blocks are hashed), so that the figures hold block boundaries,
hashing and the making of the token batch; the executor's own time is not counted. The budget is 150 us at 256 rows, and
nothing may depend on the context length. The same without prefix caching tells what hashing and naming full blocks (16
a step of 256 rows) costs.

Where the time of a step of 256 rows goes is measured in runs of their own, so that the clocks around the parts are not
counted in the table; lower deciles, so that other work of the machine is not counted either. `--shares` renews that
section alone.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.back.executor.null import NullExecutor, NullPending
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.base.wire.step import StepPlan
from headrace.core.core import EngineCore
from headrace.core.kv.manager import KVManager
from headrace.core.output_processor import StepOutputProcessor
from headrace.core.scheduler.plan_builder import StepPlanBuilder
from headrace.core.scheduler.scheduler import Scheduler

RUNNING = (1, 8, 64, 256)
CONTEXTS = (128, 8_192, 65_536)
BUDGET_US = 150.0
BLOCK_TOKENS = 16
WIDTH = 150_000
PAGE = Path(__file__).with_suffix(".md")
SHARES = "## Where the time goes"
PARTS: tuple[tuple[str, type, str], ...] = (
    ("naming full blocks", StepOutputProcessor, "_name_full_blocks"),
    ("of these: hashes, and the table of names", KVManager, "register_each"),
    ("taking in tokens, and who ends", StepOutputProcessor, "_take_tokens"),
    ("next blocks for rows that begin one", Scheduler, "_grow_all"),
    ("the plan's columns", StepPlanBuilder, "finish"),
)
"""Parts of a step: what it is, and the method that does it."""


class TimedExecutor(NullExecutor):
    """Counts the time spent in the executor, which is not the host cost of the core."""

    spent_s = 0.0

    def submit(self, plan: StepPlan) -> NullPending:
        """See Executor."""
        begin = time.perf_counter()
        pending = super().submit(plan)
        self.spent_s += time.perf_counter() - begin
        return pending


def make_spec(*, running: int, context: int, steps: int, caching: bool = True) -> EngineSpec:
    """An engine in which `running` requests of `context` tokens can decode for `steps` steps."""
    length = context + steps + running + 64
    return EngineSpec(
        model=ModelSpec(
            path="",
            name="null",
            format="dummy",
            family="null",
            dtype="float32",
            max_model_len=length,
            logits_width=WIDTH,
            eos_ids=(2,),
            config={},
        ),
        kv=KVSpec(
            block_tokens=BLOCK_TOKENS,
            prefix_caching=caching,
            num_blocks=running * (length // BLOCK_TOKENS + 2) + 1,
        ),
        scheduler=SchedulerSpec(
            max_step_tokens=65_536 + 512, max_running=running, max_queued_tokens=1 << 40
        ),
        device=DeviceSpec(device="cpu", executor="null"),
    )


def measure(*, running: int, context: int, steps: int, caching: bool = True) -> tuple[float, float]:
    """Least and median host cost of a step in microseconds."""
    core, executor = _decoding(running=running, context=context, steps=steps, caching=caching)
    figures = _time_steps(core, executor, steps)
    assert core.scheduler.num_running == running, core.scheduler.num_running
    return figures


def _decoding(
    *, running: int, context: int, steps: int, caching: bool
) -> tuple[EngineCore, TimedExecutor]:
    """A core whose requests all decode."""
    spec = make_spec(running=running, context=context, steps=steps, caching=caching)
    executor = TimedExecutor(spec)
    core = EngineCore(spec, executor)
    random = np.random.default_rng(running + context)
    for i in range(running):
        length = context - int(random.integers(BLOCK_TOKENS))  # boundaries spread over the steps
        prompt = random.integers(3, WIDTH, length, dtype=np.int32)
        core.add(
            EngineRequest(
                id=i,
                prompt=prompt.tobytes(),
                stop=StopRules(max_tokens=steps + running + 32, stop_ids=(2,)),
                sampling=RowSampling(temperature=0.0),
            )
        )
    while core.scheduler.prefilling or core.scheduler.queue:
        core.step(wait=True)
    return core, executor


def _time_steps(core: EngineCore, executor: TimedExecutor, steps: int) -> tuple[float, float]:
    figures = []
    for _ in range(steps):
        executor.spent_s = 0.0
        begin = time.perf_counter()
        core.step(wait=True)
        figures.append((time.perf_counter() - begin - executor.spent_s) * 1e6)
    return min(figures), float(np.median(figures))


def shares(steps: int) -> str:
    """The section on a step of 256 rows: microseconds of each part, and of the rest."""
    running = RUNNING[-1]
    by_context = {
        context: _parts_us(running=running, context=context, steps=steps)
        for context in CONTEXTS[:2]
    }
    lines = [
        f"{SHARES}\n",
        f"Lower deciles over {steps} steps of {running} rows, in runs of their own, us "
        f"({_cpu()}, Python {platform.python_version()}); the clocks around the parts cost some of it.\n",
        "| context | " + " | ".join(name for name, *_ in PARTS) + " | all else | whole step |",
        "|---" * (len(PARTS) + 3) + "|",
    ]
    for context, parts in by_context.items():
        lines.append(f"| {context} | " + " | ".join(f"{one:.0f}" for one in parts) + " |")
    return "\n".join([*lines, "", _reason(by_context), ""])


def _reason(by_context: dict[int, list[float]]) -> str:
    """Why the bar is missed, of what has been measured here."""
    blocks = RUNNING[-1] / BLOCK_TOKENS
    naming, growing, whole = (
        [parts[i] for parts in by_context.values()] for i in (0, 3, len(PARTS) + 1)
    )
    per_row = [(a + b) / c for a, b, c in zip(naming, growing, whole, strict=True)]
    each = [(a + b) / blocks for a, b in zip(naming, growing, strict=True)]
    return (
        f"In every step {blocks:.0f} of {RUNNING[-1]} rows fill a block of {BLOCK_TOKENS} tokens and begin the next. "
        f"Naming the one and taking the other is work of Python for each such row, {min(each):.1f} to {max(each):.1f} "
        f"us, and {min(per_row):.0%} to {max(per_row):.0%} of the step; the rest is done for all rows at once, in "
        "NumPy."
    )


def _parts_us(*, running: int, context: int, steps: int) -> list[float]:
    """Lower deciles of the parts, of what is none of them, and of all."""
    core, executor = _decoding(running=running, context=context, steps=steps, caching=True)
    spent = dict.fromkeys((method for _, _, method in PARTS), 0.0)
    rows: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        for _, owner, method in PARTS:
            stack.enter_context(_clocked(owner, method, spent))
        for _ in range(steps):
            spent |= dict.fromkeys(spent, 0.0)
            executor.spent_s = 0.0
            begin = time.perf_counter()
            core.step(wait=True)
            whole = time.perf_counter() - begin - executor.spent_s
            parts = list(spent.values())
            rows.append([*parts, whole - sum(parts) + spent["register_each"], whole])
    deciles: list[float] = (np.quantile(np.asarray(rows), 0.1, axis=0) * 1e6).tolist()
    return deciles


@contextlib.contextmanager
def _clocked(owner: type, method: str, spent: dict[str, float]) -> Iterator[None]:
    """Adds the time within a method of a class to `spent`."""
    plain = getattr(owner, method)

    def clocked(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(*arguments, **named)
        finally:
            spent[method] += time.perf_counter() - begin

    setattr(owner, method, clocked)
    try:
        yield
    finally:
        setattr(owner, method, plain)


def table(steps: int) -> str:
    """The markdown table."""
    lines = [
        f"| running | context | least us | median us | without hashes | bar: median of {BUDGET_US:.0f} us |",
        "|---|---|---|---|---|---|",
    ]
    for running in RUNNING:
        for context in CONTEXTS:
            shape = {"running": running, "context": context, "steps": steps}
            least, median = measure(**shape)
            _, without = measure(**shape, caching=False)
            lines.append(
                f"| {running} | {context} | {least:.0f} | {median:.0f} | {without:.0f} | {_verdict(running, median)} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _verdict(running: int, median_us: float) -> str:
    """The bar is set at 256 rows; it holds for whatever context."""
    if running != RUNNING[-1]:
        return "-"
    return "met" if median_us <= BUDGET_US else "missed"


def main() -> None:
    """Prints the table, or writes it beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--shares", action="store_true", help="renew the parts of a step alone")
    arguments = parser.parse_args()
    if arguments.shares:
        head = PAGE.read_text().partition(SHARES)[0].rstrip()
    else:
        head = (
            f"# Host cost of a step\n\nSchedule and update, null executor, one core of {_cpu()}, Python "
            f"{platform.python_version()}, {arguments.steps} steps each; budget {BUDGET_US:.0f} us at 256 rows. "
            f"Made by `python -m benchmarks.host_cost --write`.\n\n{table(arguments.steps)}"
        )
    text = f"{head}\n\n{shares(arguments.steps)}"
    if arguments.write:
        PAGE.write_text(text)
    print(text)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.machine()


if __name__ == "__main__":
    main()
