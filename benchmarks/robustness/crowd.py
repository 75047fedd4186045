"""Probes and refusals beside 4,000 connections that ask for 20 times the capacity (reliability 1.2, 1.5; BEY-17).

    python -m benchmarks.robustness.crowd --seconds 20 --write

The crowd is a process of its own: it opens its connections as fast as it can, keeps them, and sends requests at random
times on those that have nothing under way. After a share `--renew` of its answers it opens the connection anew. The
probes are a third process, which opens a connection for each, as a kubelet does. `connecting` are the probes sent while
the crowd opened its connections, `loaded` those after it. `refused` is measured by the crowd, from the write of a
request to the end of its answer: the crowd's own lag, told beside it, is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.robustness.overload import api_cpu_s
from benchmarks.robustness.serving import null_model, server

STEP_S, ROWS, TOKENS, QUEUE = 0.02, 8, 8, 16
CAPACITY = ROWS / (TOKENS * STEP_S)  # requests a second
KEY = "key-0"
BODY = json.dumps({"prompt": "fox", "max_tokens": TOKENS, "min_tokens": TOKENS}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s" % (KEY.encode(), len(BODY), BODY)
)
PATHS = ("/health/live", "/health/ready", "/health")
PERIOD_S = 0.02


class Client(asyncio.Protocol):
    """One kept connection of the crowd; sends one request at a time."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.received = bytearray()
        self.sent_at: float | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.crowd.idle.append(self)

    def send(self) -> None:
        self.sent_at = time.perf_counter()
        self.received.clear()
        self.transport.write(POST)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = bytes(self.received).partition(b"\r\n\r\n")
        if not end or self.sent_at is None:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        took_ms = 1000 * (time.perf_counter() - self.sent_at)
        self.sent_at = None
        status = int(head.split(b" ", 2)[1])
        self.crowd.ended(self, status, took_ms, b"retry-after:" in lower)

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.lost(self)


class Crowd:
    """The connections, and what became of their requests."""

    def __init__(self, port: int, size: int, renew: float) -> None:
        self.port, self.size, self.renew = port, size, renew
        self.idle: deque[Client] = deque()
        self.statuses: Counter[str] = Counter()
        self.refused_ms: list[float] = []
        self.told = 0
        self.lags_ms: list[float] = []
        self.random = random.Random(20)
        self.tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            try:
                await loop.create_connection(lambda: Client(self), "127.0.0.1", self.port)
                return
            except OSError:
                self.statuses["not connected"] += 1

    def ended(self, client: Client, status: int, took_ms: float, told: bool) -> None:
        self.statuses[str(status)] += 1
        if status in (429, 503):
            self.refused_ms.append(took_ms)
            self.told += told
        if self.random.random() < self.renew:
            client.transport.close()
        else:
            self.idle.append(client)

    def lost(self, client: Client) -> None:
        if client.sent_at is not None:
            self.statuses["lost"] += 1
        elif client in self.idle:
            self.idle.remove(client)
        task = asyncio.ensure_future(self.open())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, seconds: float, rate: float) -> dict[str, Any]:
        begin = time.perf_counter()
        await asyncio.gather(*(self.open() for _ in range(self.size)))
        connected_s = time.perf_counter() - begin
        print("connected", flush=True)
        begin, due, short = time.perf_counter(), 0.0, 0
        while (due := due + self.random.expovariate(rate)) < seconds:
            if (left := begin + due - time.perf_counter()) > 0:
                before = time.perf_counter()
                await asyncio.sleep(left)
                self.lags_ms.append(1000 * (time.perf_counter() - before - left))
            if self.idle:
                self.idle.popleft().send()
            else:
                short += 1
        await asyncio.sleep(1)
        return {
            "connected_s": round(connected_s, 2), "statuses": dict(self.statuses),
            "without_a_connection": short, "with_retry_after": self.told,
            "refused": percentiles(self.refused_ms), "client_lag": percentiles(self.lags_ms),
        }  # fmt: skip


def percentiles(took_ms: list[float]) -> dict[str, float]:
    """p50, p99 and the greatest of times in milliseconds, and how many there are."""
    if not took_ms:
        return {"count": 0}
    p50, p99 = (round(float(np.percentile(took_ms, p)), 1) for p in (50, 99))
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": round(max(took_ms), 1), "count": len(took_ms)}


def probe_for_ever(port: int) -> None:
    """A line for each probe: when, path, status, milliseconds; until standard input ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    number = 0
    while True:
        path, number = PATHS[number % len(PATHS)], number + 1
        begin = time.perf_counter()
        status = b"lost"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as probe:
                probe.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
                status = probe.recv(4096)[9:12]
        except OSError:
            pass
        took_ms = 1000 * (time.perf_counter() - begin)
        print(time.time(), path, status.decode(), took_ms, flush=True)
        time.sleep(max(0.0, PERIOD_S - took_ms / 1000))


def probes_between(lines: list[str], begin: float, end: float) -> dict[str, Any]:
    """The figures of the probes sent between two times; the last line may have been cut."""
    whole = [fields for line in lines if len(fields := line.split()) == 4]
    found = [fields for fields in whole if begin <= float(fields[0]) < end]
    report: dict[str, Any] = {
        path: percentiles([float(ms) for _, p, _, ms in found if p == path]) for path in PATHS
    }
    return report | {"not_200": sum(status != "200" for _, _, status, _ in found)}


def run(port: int, supervisor: psutil.Process, given: argparse.Namespace) -> dict[str, Any]:
    me = [sys.executable, "-m", "benchmarks.robustness.crowd"]
    probing = subprocess.Popen(
        [*me, "--probe", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    time.sleep(given.seconds / 4)
    began = time.time()
    words = ["--crowd", str(port), "--connections", str(given.connections)]
    words += ["--seconds", str(given.seconds), "--renew", str(given.renew)]
    words += ["--level", str(given.level)]
    cpu_s = api_cpu_s(supervisor)
    crowd = subprocess.Popen([*me, *words], stdout=subprocess.PIPE, text=True)
    assert crowd.stdout is not None
    crowd.stdout.readline()
    connected = time.time()
    document = json.loads(crowd.stdout.read())
    ended = time.time()
    crowd.wait()
    cpu_s = api_cpu_s(supervisor) - cpu_s
    out, _ = probing.communicate()
    lines = out.splitlines()
    return {
        "seconds": given.seconds, "connections": given.connections, "level": given.level,
        "capacity_req_s": CAPACITY, "load_average": [round(x, 1) for x in os.getloadavg()],
        "api_cpu_s": round(cpu_s, 2), "idle": probes_between(lines, 0, began),
        "connecting": probes_between(lines, began, connected),
        "loaded": probes_between(lines, connected, ended), "crowd": document,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=4000)
    parser.add_argument("--level", type=float, default=20.0, help="times the capacity")
    parser.add_argument(
        "--renew", type=float, default=0.05, help="share of answers that end a connection"
    )
    parser.add_argument("--model", help="a real one, in place of the null executor")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    if given.probe:
        probe_for_ever(given.probe)
    if given.crowd:
        crowd = Crowd(given.crowd, given.connections, given.renew)
        report = uvloop.run(crowd.run(given.seconds, given.level * CAPACITY))
        print(json.dumps(report))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = [given.model] if given.model else null_model(Path(folder), step_s=STEP_S)
        arguments += ["--max-running", str(ROWS)]
        arguments += ["--max-queued-requests", str(QUEUE), "--api-keys", KEY]
        # Half of the places are for connections that have shown no key yet: all of the crowd, at first.
        arguments += ["--max-connections", str(2 * given.connections + 500)]
        with server(*arguments) as (base, supervisor):
            report = run(int(base.rpartition(":")[2]), supervisor, given)
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    loaded = report["loaded"]
    within = all(loaded[path]["p99_ms"] <= 50 for path in PATHS)
    return 0 if within and report["crowd"]["refused"]["p99_ms"] <= 50 else 1


if __name__ == "__main__":
    sys.exit(main())
