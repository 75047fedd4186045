"""What the device does while many stream from the server: steps of each kind, and how long it idles in and between.

    python -m benchmarks.h200.served --shape qwen3-0.6b --users 256 [--out served.json]

The server's own profiler, for a second in the middle of a closed loop (that of benchmarks/h200/server.py). Launches
are slower under the profiler; what a step replays is not. `launched` steps are not replayed: their size is met for
the first or second time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import secrets
import tempfile
import threading
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.h200.server import start, stop
from benchmarks.h200.shapes import write_model
from benchmarks.h200.where import FIRST
from headrace.bench.report import markdown_table
from headrace.bench.serve import LoadSpec, run_load

LAUNCHED_IDLE_US = 1000.0
Kernel = tuple[float, float, str]
"""Begin and end in microseconds, and name."""


def kernels_of(trace: Path) -> list[Kernel]:
    """What ran on the device, in order."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memset")
    )


def steps_of(kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Each whole step: microseconds from its first kernel to its last, idle in it, and idle before the next."""
    at = [i for i, kernel in enumerate(kernels) if FIRST in kernel[2]]
    found = []
    for begin, end in pairwise(at):
        until, idle = kernels[begin][0], 0.0
        for first, last, _ in kernels[begin:end]:
            idle += max(0.0, first - until)
            until = max(until, last)
        mixed = any("prefill" in name for _, _, name in kernels[begin:end])
        kind = "prompts" if mixed else "decodes"
        found.append(
            {
                "kind": f"{kind}, launched" if idle > LAUNCHED_IDLE_US else kind,
                "us": until - kernels[begin][0],
                "idle_us": idle,
                "gap_us": max(0.0, kernels[end][0] - until),
            }
        )
    return found


def table(steps: list[dict[str, Any]]) -> str:
    """A row per kind of step."""
    rows = []
    for kind in sorted({step["kind"] for step in steps}):
        of = [step for step in steps if step["kind"] == kind]
        columns = [[step[name] for step in of] for name in ("us", "idle_us", "gap_us")]
        figures = [f"{np.median(column):.0f}" for column in columns]
        totals = [f"{sum(column) / 1e3:.1f}" for column in columns]
        gap_p90 = f"{np.percentile(columns[2], 90):.0f}"
        rows.append([kind, len(of), *figures, gap_p90, *totals])
    header = ("step", "count", "us", "idle in it us", "gap behind us", "gap p90")
    return markdown_table([*header, "all ms", "idle in all ms", "gaps in all ms"], rows)


def ask(base: str, path: str, key: str) -> Any:
    """An administrative call."""
    request = urllib.request.Request(
        base + path, method="POST", headers={"Authorization": f"Bearer {key}"}, data=b""
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.loads(answer.read())


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--users", type=int, default=256)
    parser.add_argument("--after-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as name:
        options = [*given.serve.split(), "--admin-key", key, "--profile-dir", name]
        process, base, _ = start(write_model(Path(name), given.shape), options)
        try:
            load = {"base_url": base, "endpoint": "completions", "token_ids": 150_000}
            load |= {"output_tokens": 128, "input_words": 1024, "spread": 0.5}
            load |= {"concurrency": given.users}
            run_load(LoadSpec(**load, num_requests=given.users))
            more = LoadSpec(**load, num_requests=given.users * 4, seed=given.users)
            users = threading.Thread(target=run_load, args=(more,))
            users.start()
            time.sleep(given.after_s)
            ask(base, "/start_profile", key)
            time.sleep(given.seconds)
            ask(base, "/stop_profile", key)
            users.join()
        finally:
            stop(process)
        steps = steps_of(kernels_of(next(Path(name).glob("worker-*.json.gz"))))
    print(table(steps))
    if given.out:
        given.out.write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
