"""Readers that take a byte a second beside one that reads at once (reliability 1.7).

    python -m benchmarks.robustness.slow_readers --readers 500 --write

Every reader asks for a long stream over a socket with a small buffer. `bystander_gap_ms` are the gaps between the
chunks of a stream that is read at once, alone first, then beside as many streams that are all read, then beside as
many that are not: the ratio of the last two is what slowness itself costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from benchmarks.robustness.serving import at_rest, null_model, resident_by_role, server

STEP_S = 0.1
TOKENS = 2000
BODY = {"prompt": "fox", "stream": True, "max_tokens": TOKENS, "min_tokens": TOKENS}


async def reader(base: str, *, slow: bool) -> None:
    """One stream, read at once or a byte a second, until it is cancelled."""
    host, port = base.removeprefix("http://").split(":")
    sock = socket.socket()
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, (host, int(port)))
        body = json.dumps(BODY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        await loop.sock_sendall(
            sock, f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        while await loop.sock_recv(sock, 1 if slow else 65536):
            if slow:
                await asyncio.sleep(1)
    finally:
        sock.close()


async def gaps_ms(base: str, seconds: float) -> dict[str, float]:
    """The gaps of one stream that is read at once."""
    gaps: list[float] = []
    async with (
        aiohttp.ClientSession(base) as session,
        session.post("/v1/completions", json=BODY) as response,
    ):
        end, last = time.perf_counter() + seconds, 0.0
        async for line in response.content:
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                gaps += [now - last] if last else []
                last = now
            if now > end:
                break
    return {f"p{p}": round(1000 * float(np.percentile(gaps, p)), 1) for p in (50, 99)}


async def beside(base: str, count: int, seconds: float, *, slow: bool) -> dict[str, float]:
    tasks = [asyncio.create_task(reader(base, slow=slow)) for _ in range(count)]
    await asyncio.sleep(5)
    found = await gaps_ms(base, seconds)
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def run(base: str, supervisor: psutil.Process, count: int, seconds: float) -> dict[str, Any]:
    alone = await gaps_ms(base, seconds)
    async with aiohttp.ClientSession(base) as session:
        read = await beside(base, count, seconds, slow=False)
        await at_rest(session)
        before = resident_by_role(supervisor)
        slow = await beside(base, count, seconds, slow=True)
        after = resident_by_role(supervisor)
        rest = await at_rest(session)
    grown = (after["api"] - before["api"]) / count
    return {
        "readers": count, "seconds": seconds, "load_average": [round(x, 1) for x in os.getloadavg()],
        "bystander_gap_ms": {"alone": alone, "beside_readers": read, "beside_slow": slow},
        "p99_slow_over_read": round(slow["p99"] / read["p99"], 2),
        "api_mib_per_slow_stream": round(grown, 3),
        "leaked_blocks": rest["total_blocks"] - rest["free_blocks"],
        "running_waiting": [rest["running"], rest["waiting"]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--readers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = str(given.readers + 8)
        limits = (
            "--max-running",
            rows,
            "--max-requests-per-key",
            rows,
            "--max-step-tokens",
            "1024",
        )
        with server(*null_model(Path(folder), step_s=STEP_S), *limits) as (base, supervisor):
            report = asyncio.run(run(base, supervisor, given.readers, given.seconds))
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    whole = report["leaked_blocks"] == 0 and report["running_waiting"] == [0, 0]
    return 0 if whole and report["api_mib_per_slow_stream"] <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
