"""Host cost of one step: planning it and taking in its result, in microseconds, on the null executor.

    python -m benchmarks.host_cost [--steps N] [--write]

Measured in steady decode with prefix caching on (full blocks are hashed), so that the figures hold block boundaries,
hashing and the making of the token batch; the executor's own time is not counted. The budget is 150 us at 256 rows, and
nothing may depend on the context length. The same without prefix caching tells what hashing and naming full blocks (16
a step of 256 rows) costs.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import numpy as np

from headrace.back.executor.null import NullExecutor, NullPending
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.base.wire.step import StepPlan
from headrace.core.core import EngineCore

RUNNING = (1, 8, 64, 256)
CONTEXTS = (128, 8_192, 65_536)
BUDGET_US = 150.0
BLOCK_TOKENS = 16
WIDTH = 150_000


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
    figures = _time_steps(core, executor, steps)
    assert core.scheduler.num_running == running, core.scheduler.num_running
    return figures


def _time_steps(core: EngineCore, executor: TimedExecutor, steps: int) -> tuple[float, float]:
    figures = []
    for _ in range(steps):
        executor.spent_s = 0.0
        begin = time.perf_counter()
        core.step(wait=True)
        figures.append((time.perf_counter() - begin - executor.spent_s) * 1e6)
    return min(figures), float(np.median(figures))


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
    arguments = parser.parse_args()
    text = (
        f"# Host cost of a step\n\nSchedule and update, null executor, one core of {_cpu()}, Python "
        f"{platform.python_version()}, {arguments.steps} steps each; budget {BUDGET_US:.0f} us at 256 rows. "
        f"Made by `python -m benchmarks.host_cost --write`.\n\n{table(arguments.steps)}\n"
    )
    if arguments.write:
        Path(__file__).with_suffix(".md").write_text(text)
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
