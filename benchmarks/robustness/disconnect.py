"""Requests cut at a random moment, by FIN and by RST, on every route and shape (reliability 1.1).

    python -m benchmarks.robustness.disconnect --cuts 1500 --write

The server runs the null executor at a fixed time per step, so that the phase of a cut is drawn, not left to the
machine: in the upload, queued, in the prefill, while decoding, streamed or not, n > 1, or with the answer ready and not
read. `abort_ms` is the time from the close to the moment the core holds the request no more, as a look every
POLL_S sees it; `tokens_after` counts the tokens per sequence since a look just before the close, less those that were
due until the close: on a busy machine the look itself takes some steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.robustness.serving import at_rest, ledger, null_model, server

STEP_S = 0.02
POLL_S = 0.005
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion, streamed": ("/v1/completions", {"prompt": "fox", "stream": True}),
    "completion, plain": ("/v1/completions", {"prompt": "fox"}),
    "chat, streamed": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
    "chat, plain": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "n = 4": ("/v1/completions", {"prompt": "fox", "n": 4, "stream": True}),
    "long prompt": ("/v1/completions", {"prompt": "fox " * 900, "stream": True}),
    "several prompts": ("/v1/completions", {"prompt": ["fox", "dog"], "n": 2}),
}  # fmt: skip
SEQUENCES = {"n = 4": 4, "several prompts": 4}
PHASES = ["upload", "sent", "prefill", "decode", "unread"]


def request_bytes(path: str, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def send(port: int, shape: str, phase: str, random_: random.Random) -> socket.socket:
    """An open connection with its request in the phase."""
    path, document = SHAPES[shape]
    tokens = 3 if phase == "unread" else 1500
    data = request_bytes(path, {**document, "max_tokens": tokens, "min_tokens": tokens})
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", port))
    await loop.sock_sendall(connection, data[: len(data) // 2] if phase == "upload" else data)
    if phase == "prefill":
        await asyncio.sleep(random_.uniform(0.0, 2 * STEP_S))
    elif phase == "decode":
        if document.get("stream"):
            await loop.sock_recv(connection, 65536)
        await asyncio.sleep(random_.uniform(0.0, 10 * STEP_S))
    elif phase == "unread":
        await asyncio.sleep(6 * STEP_S)
    return connection


def leave(connection: socket.socket, *, reset: bool) -> float:
    """Closes by FIN or RST; when, on the monotonic clock."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return time.monotonic()


async def until_free(session: aiohttp.ClientSession) -> tuple[float, dict[str, Any]]:
    """When the core holds nothing any more, and the ledger at that moment."""
    end = time.monotonic() + 10
    while True:
        asked = time.monotonic()
        seen = await ledger(session)
        if (seen["running"], seen["waiting"]) == (0, 0) or asked > end:
            return asked, seen
        await asyncio.sleep(POLL_S)


async def run(base: str, cuts: int, seed: int) -> dict[str, Any]:
    """One cut at a time: so the core's counters tell what each of them cost."""
    random_ = random.Random(seed)
    took: dict[str, list[float]] = {phase: [] for phase in PHASES}
    after: list[float] = []
    seen: Counter[str] = Counter()
    port = int(base.rpartition(":")[2])
    async with aiohttp.ClientSession(base) as session:
        start = await at_rest(session)
        for _ in range(cuts):
            shape, phase = random_.choice(list(SHAPES)), random_.choice(PHASES)
            reset = random_.random() < 0.5
            seen[f"{phase}, {'RST' if reset else 'FIN'}"] += 1
            connection = await send(port, shape, phase, random_)
            then = await ledger(session)
            asked = time.monotonic()
            closed = leave(connection, reset=reset)
            free, rest = await until_free(session)
            took[phase].append(max(0.0, free - closed))
            tokens = (rest["output_tokens"] - then["output_tokens"]) / SEQUENCES.get(shape, 1)
            after.append(max(0.0, tokens - (closed - asked) / STEP_S))
        end = await at_rest(session)
    every = [value for values in took.values() for value in values]
    return {
        "cuts": cuts, "seed": seed, "step_ms": 1000 * STEP_S,
        "phases": dict(sorted(seen.items())),
        "abort_ms": {f"p{p}": round(1000 * float(np.percentile(every, p)), 1) for p in (50, 90, 99, 100)},
        "abort_ms_p99_by_phase": {k: round(1000 * float(np.percentile(v, 99)), 1) for k, v in took.items() if v},
        "tokens_after": {"p99": round(float(np.percentile(after, 99)), 2), "most": round(max(after), 2)},
        "leaked_blocks": end["total_blocks"] - end["free_blocks"],
        "running_waiting": [end["running"], end["waiting"]],
        "fds": [start["process"]["fds"], end["process"]["fds"]],
        "tasks": [start["process"]["tasks"], end["process"]["tasks"]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = null_model(Path(folder), step_s=STEP_S)
        with server(*arguments) as (base, _):
            report = asyncio.run(run(base, given.cuts, given.seed))
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    bad = report["leaked_blocks"] or report["running_waiting"] != [0, 0]
    slow = report["abort_ms"]["p99"] >= 200 or report["tokens_after"]["p99"] > 2
    return 1 if bad or slow else 0


if __name__ == "__main__":
    sys.exit(main())
