"""Health probes at 10 Hz, idle and at five times the capacity, and the time until a stopped core shows (1.5).

    python -m benchmarks.robustness.probes --seconds 20 --write

The load comes from a process of its own, so that the probes measure the server and not their own client. `false_dead`
counts probes of /health/live that were not 200, `false_not_ready` those of /health/ready while requests were served;
`not_ready_after_s` is counted from SIGSTOP of the engine core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil

from benchmarks.robustness.serving import children, null_model, server

STEP_S, ROWS, TOKENS, QUEUE = 0.02, 4, 8, 8
CAPACITY = ROWS / (TOKENS * STEP_S)
PERIOD_S = 0.1
PATHS = ("/health/live", "/health/ready", "/health")


async def load(base: str) -> None:
    """Five times the capacity until this process is ended."""
    body = {"prompt": "fox", "max_tokens": TOKENS, "min_tokens": TOKENS}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base, connector=connector) as session:
        tasks: set[asyncio.Task[None]] = set()

        async def one() -> None:
            async with session.post("/v1/completions", json=body) as response:
                await response.read()

        while True:
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(1 / (5 * CAPACITY))


def probe(client: httpx.Client, seconds: float) -> dict[str, Any]:
    """Each path in turn, ten probes a second."""
    took_ms: list[float] = []
    wrong: dict[str, int] = dict.fromkeys(PATHS, 0)
    due = time.perf_counter()
    for number in range(int(seconds / PERIOD_S)):
        path = PATHS[number % len(PATHS)]
        time.sleep(max(0.0, due - time.perf_counter()))
        begin = time.perf_counter()
        wrong[path] += client.get(path).status_code != 200
        took_ms.append(1000 * (time.perf_counter() - begin))
        due += PERIOD_S
    return {
        **{f"p{p}_ms": round(float(np.percentile(took_ms, p)), 1) for p in (50, 99)},
        "probes": len(took_ms), "false_dead": wrong["/health/live"],
        "false_not_ready": wrong["/health/ready"] + wrong["/health"],
    }  # fmt: skip


def stopped_core(client: httpx.Client, supervisor: psutil.Process) -> float:
    """Seconds from SIGSTOP of the core to the first answer that is not ready."""
    core = next(pid for pid, line in children(supervisor).items() if "core_process" in line)
    os.kill(core, signal.SIGSTOP)
    begin = time.perf_counter()
    while client.get("/health/ready").status_code == 200 and time.perf_counter() - begin < 60:
        time.sleep(0.02)
    return round(time.perf_counter() - begin, 2)


def run(base: str, supervisor: psutil.Process, seconds: float) -> dict[str, Any]:
    with httpx.Client(base_url=base, timeout=30) as client:
        idle = probe(client, seconds)
        attacker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.robustness.probes", "--load", base]
        )
        try:
            time.sleep(3)
            loaded = probe(client, seconds)
        finally:
            attacker.kill()
            attacker.wait()
        return {
            "seconds": seconds, "load_average": [round(x, 1) for x in os.getloadavg()],
            "idle": idle, "five_times_capacity": loaded,
            "not_ready_after_s": stopped_core(client, supervisor),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        asyncio.run(load(given.load))
    with tempfile.TemporaryDirectory() as folder:
        limits = ("--max-running", str(ROWS), "--max-queued-requests", str(QUEUE))
        with server(*null_model(Path(folder), step_s=STEP_S), *limits) as (base, supervisor):
            report = run(base, supervisor, given.seconds)
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    parts = (report["idle"], report["five_times_capacity"])
    wrong = sum(part["false_dead"] + part["false_not_ready"] for part in parts)
    return 1 if wrong or report["not_ready_after_s"] > 10 else 0


if __name__ == "__main__":
    sys.exit(main())
