"""What the robustness runs share: a server process tree, bystander streams with known text, and the ledger at rest."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

READY = re.compile(r"headrace is ready: (http://\S+)")
DEMO = Path(__file__).parents[2] / "demo" / "model"

BYSTANDER_PROMPTS = [
    "Hello! Who are you?",
    "What is 17 + 25?",
    "Tell me a short story about a fox.",
    "Sort these numbers: 9 4 7 1",
    "Repeat after me: blue river stone",
    "Count the words: one two three four",
    "What can you do?",
    "Tell me a story about a boat.",
]


@contextmanager
def server(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """`headrace serve` with the bundled model; yields its address and the supervisor's process."""
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        "--port",
        "0",
        "--log-level",
        "warning",
        *arguments,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    assert process.stdout is not None
    try:
        base = next((found[1] for line in process.stdout if (found := READY.match(line))), None)
        assert base is not None, "the server ended before it was ready"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield base, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def null_model(folder: Path, *, step_s: float) -> list[str]:
    """Arguments that serve the bundled model's shape on the null executor, at a fixed time per step."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "null_step_s": step_s}))
    return [str(folder), "--load-format", "dummy", "--executor", "null"]


def children(supervisor: psutil.Process) -> dict[int, str]:
    """pid -> command line of every process of the server."""
    found: dict[int, str] = {}
    for process in supervisor.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some are made to be killed
            found[process.pid] = " ".join(process.cmdline())
    return found


def resident_mib(supervisor: psutil.Process) -> float:
    """Resident memory of the whole tree."""
    return (
        sum(p.memory_info().rss for p in [supervisor, *supervisor.children(recursive=True)]) / 2**20
    )


ROLES = {
    "core_process": "core",
    "executor.worker": "rank",
    "server.process": "api",
    "template_worker": "templates",
    "grammar.sandbox": "grammar sandboxes",
    "body_worker": "large bodies",
    "stream_guard_worker": "stream guard",
}


def resident_by_role(supervisor: psutil.Process) -> dict[str, int]:
    """Resident MiB of the processes of each kind; a kind may have several."""
    found: dict[str, float] = {}
    for process in [supervisor, *supervisor.children(recursive=True)]:
        try:
            line, mib = " ".join(process.cmdline()), process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue  # template workers are made to be killed
        role = next((role for part, role in ROLES.items() if part in line), "supervisor")
        found[role] = found.get(role, 0.0) + mib
    return {role: round(mib) for role, mib in sorted(found.items())}


async def bystander(
    session: aiohttp.ClientSession,
    number: int,
    *,
    max_tokens: int = 48,
    on_gap: Callable[[float], None] = lambda gap: None,
) -> tuple[str, list[float]]:
    """One greedy streamed chat; its text and the gaps between its chunks in seconds."""
    body = {
        "stream": True, "temperature": 0, "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": BYSTANDER_PROMPTS[number]}],
    }  # fmt: skip
    text, gaps, last = "", [], time.perf_counter()
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return f"status {response.status}: {await response.text()}", []
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return f"error: {chunk['error']}", gaps
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            now = time.perf_counter()
            gaps.append(now - last)
            on_gap(now - last)
            last = now
    return text, gaps


async def ledger(session: aiohttp.ClientSession) -> dict[str, Any]:
    """GET /v1/requests of a server with one engine core: what the core holds, and the API process."""
    async with session.get("/v1/requests") as response:
        document = await response.json()
    return {**document["engines"][0], "process": document["process"]}


async def at_rest(session: aiohttp.ClientSession, *, timeout_s: float = 60) -> dict[str, Any]:
    """The ledger once nothing runs and nothing waits, or as it stands at the timeout."""
    end = time.monotonic() + timeout_s
    while True:
        seen = await ledger(session)
        if (seen.get("running"), seen.get("waiting")) == (0, 0) or time.monotonic() > end:
            return seen
        await asyncio.sleep(0.1)
