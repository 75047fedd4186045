"""Where a step's time goes on one H200: exclusive time of each kernel, and clocks and power under the load.

    python -m benchmarks.h200.where --shape qwen3-8b --batches 8,32,128,256 --mixed 2048 --offline --out where.json

Kernels overlap (dependent launch): a kernel's exclusive time is what it adds to the end of all before it, so that the
times of a step and its idle time add up to the step. `mixed`: a step's budget of tokens, prompts of 1024 beside 256
rows that decode. `offline`: the steps of 512 requests to their end, by what is in them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from torch.profiler import ProfilerActivity, profile

from benchmarks.h200.offline import make_engine
from benchmarks.h200.routing import uniform_routing
from benchmarks.h200.shapes import QUANTIZATION, write_model
from headrace.bench.offline import OfflineEngine
from headrace.bench.throughput import draw_lengths

FIRST = "_update_kernel"
"""The first kernel of every step."""


class Clocks:
    """Samples of the multiprocessors' clock (MHz) and the board's power (W), by NVML."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    @contextmanager
    def sampled(self, into: dict[str, Any], *, trace: bool = False) -> Iterator[None]:
        """Adds medians of the block to `into`; with `trace` also [MHz, W] every 10 ms."""
        nvml, done, seen = self._nvml, threading.Event(), []

        def sample() -> None:
            while not done.wait(0.01):
                mhz = nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM)
                reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._device)
                seen.append((mhz, nvml.nvmlDeviceGetPowerUsage(self._device) / 1000, reasons))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if seen:
            into["mhz"] = float(np.median([one[0] for one in seen]))
            into["watts"] = float(np.median([one[1] for one in seen]))
            into["reasons"] = hex(max({one[2] for one in seen}))
            if trace:
                into["trace"] = [[mhz, round(watts)] for mhz, watts, _ in seen]


def exclusive(events: list[tuple[int, int, str]]) -> dict[str, Any]:
    """Of (start, end, name) in nanoseconds: steps, and microseconds per step of each kernel and of idle time. The
    first and the last step are left out."""
    events = sorted(events)
    starts = [i for i, event in enumerate(events) if FIRST in event[2]]
    events = events[starts[1] : starts[-1]]
    steps, until, total = len(starts) - 2, events[0][0], {"(idle)": [0, 0.0]}
    for start, end, name in events:
        if start > until:
            total["(idle)"][1] += start - until
            until = start
        entry = total.setdefault(name[:70], [0, 0.0])
        entry[0] += 1
        if end > until:
            entry[1] += end - until
            until = end
    ranked = sorted(total.items(), key=lambda item: -item[1][1])
    return {
        "steps": steps,
        "step_us": (until - events[0][0]) / steps / 1e3,
        "kernels": [
            (name, round(count / steps, 2), round(ns / steps / 1e3, 1))
            for name, (count, ns) in ranked[:22]
        ],
    }


def recorded(engine: OfflineEngine, steps: int) -> list[tuple[int, int, str]]:
    """The kernels of the engine's next steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            engine.core.step(wait=True)
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in seen.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type()) and "emcpy" not in event.name()
    ]


def budget(engine: OfflineEngine, tokens: int) -> None:
    """Steps of at most so many tokens from now on."""
    scheduler = engine.core.scheduler
    scheduler.spec = msgspec.structs.replace(scheduler.spec, max_step_tokens=tokens)


def finish(engine: OfflineEngine) -> None:
    """Until nothing is left."""
    while engine.core.requests:
        engine.core.step(wait=True)


def decodes(engine: OfflineEngine, clocks: Clocks, batch: int, prompt: int) -> dict[str, Any]:
    """A batch that decodes."""
    rng, row = np.random.default_rng(1), {"batch": batch, "prompt": prompt}
    engine.run([engine.request(rng, prompt, 24, 0.0) for _ in range(batch)])
    for _ in range(batch):
        engine.core.add(engine.request(rng, prompt, 150, 0.0))
    while len(engine.core.scheduler.queue) or engine.core.scheduler.prefilling:
        engine.core.step(wait=True)
    for _ in range(4):
        engine.core.step(wait=True)
    with clocks.sampled(row):
        begin = time.perf_counter()
        for _ in range(90):
            engine.core.step(wait=True)
        row["unprofiled_us"] = (time.perf_counter() - begin) / 90 * 1e6
    row |= exclusive(recorded(engine, 14))
    finish(engine)
    return row


def prompts(engine: OfflineEngine, clocks: Clocks, count: int, length: int) -> dict[str, Any]:
    """Prompts alone: the kernels of all of them together, as of one step."""
    rng, row = np.random.default_rng(3), {"prompts": count, "length": length}
    for _ in range(2):
        engine.run([engine.request(rng, length, 1, 0.0) for _ in range(count)])
    for _ in range(count):
        engine.core.add(engine.request(rng, length, 1, 0.0))
    with clocks.sampled(row), profile(activities=[ProfilerActivity.CUDA]) as seen:
        finish(engine)
    total: dict[str, list[float]] = {}
    for event in seen.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and "emcpy" not in event.name():
            entry = total.setdefault(event.name()[:70], [0, 0.0])
            entry[0] += 1
            entry[1] += event.duration_ns() / 1e3
    ranked = sorted(total.items(), key=lambda item: -item[1][1])
    row["us"] = round(sum(us for _, us in total.values()), 1)
    row["kernels"] = [(name, int(n), round(us, 1)) for name, (n, us) in ranked[:22]]
    return row


def mixed(engine: OfflineEngine, clocks: Clocks, tokens: int, users: int) -> dict[str, Any]:
    """Steps of prompts beside decodes."""
    rng, row = np.random.default_rng(2), {"mixed": tokens, "users": users}
    budget(engine, tokens)

    def load(count: int) -> None:
        for length in rng.integers(64, 192, count).tolist():
            engine.core.add(engine.request(rng, int(rng.integers(512, 1536)), length, 0.0))

    load(2 * users)
    sizes: list[tuple[int, int]] = []
    for _ in range(140):  # by then as many requests end as begin
        engine.core.step(wait=True)
    with clocks.sampled(row):
        begin = time.perf_counter()
        for _ in range(40):
            engine.core.step(wait=True)
            if in_flight := engine.core._in_flight_steps:
                sizes.append((in_flight[-1][0].num_decodes, in_flight[-1][0].num_prefill_tokens))
        row["unprofiled_us"] = (time.perf_counter() - begin) / 40 * 1e6
    row["decodes"], row["prefill"] = (float(np.mean(column)) for column in zip(*sizes, strict=True))
    row |= exclusive(recorded(engine, 12))
    engine.core.abort([request.id for request in engine.core.requests])
    while engine.core.has_work:
        engine.core.step(wait=True)
    return row


def offline(engine: OfflineEngine, clocks: Clocks) -> dict[str, Any]:
    """Seconds of the steps of `offline.offline`'s load: with prompts, and by how many rows decode."""
    rng, row, steps = np.random.default_rng(0), {}, []
    prefill_budget = engine.core.scheduler.prefill_budget

    def landed(submitted_at: float, now: float, *, decodes: int, prefill_tokens: int) -> None:
        steps.append((now, decodes, prefill_tokens))

    inputs, outputs = (draw_lengths(rng, mean, 0.6, 512).tolist() for mean in (1024, 320))
    requests = [engine.request(rng, i, o, 0.0) for i, o in zip(inputs, outputs, strict=True)]
    with patch.object(prefill_budget, "observe", landed), clocks.sampled(row):
        trace = engine.run(requests)
    seen = np.array(steps)
    ms = 1e3 * np.diff(seen[:, 0], prepend=trace.start_s)
    groups = {"with prompts": seen[:, 2] > 0}
    for low in range(0, 512, 64):
        inside = (seen[:, 1] > low) & (seen[:, 1] <= low + 64)
        groups[f"{low + 1} to {low + 64} rows"] = inside & (seen[:, 2] == 0)
    row["output_tok_s"] = sum(trace.num_tokens) / trace.wall_s
    row["steps"] = [
        (name, int(of.sum()), float(np.median(ms[of])), float(ms[of].mean()), ms[of].sum() / 1e3)
        for name, of in groups.items()
        if of.any()
    ]
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batches", default="8,32,128,256")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--prompts", default="", help="prompts alone, such as 1x8192,16x1024")
    parser.add_argument("--mixed", default="2048", help="budgets of tokens; empty: none")
    parser.add_argument("--users", type=int, default=256)
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, uniform_routing(given.shape):
        engine = make_engine(
            write_model(Path(folder), given.shape),
            quantization=QUANTIZATION.get(given.shape, "none"),
        )
    clocks, rows = Clocks(), []
    try:
        if given.offline:
            rows.append(offline(engine, clocks))
            print(json.dumps(rows[-1]), flush=True)
        for batch in given.batches.split(","):
            rows.append(decodes(engine, clocks, int(batch), given.prompt))
            print(json.dumps(rows[-1]), flush=True)
        for one in given.prompts.split(",") if given.prompts else []:
            count, length = map(int, one.split("x"))
            rows.append(prompts(engine, clocks, count, length))
            print(json.dumps(rows[-1]), flush=True)
        for tokens in given.mixed.split(",") if given.mixed else []:
            rows.append(mixed(engine, clocks, int(tokens), given.users))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))
        engine.close()


if __name__ == "__main__":
    main()
