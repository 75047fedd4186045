"""Every kind of process of a server is killed and stopped in turn under streams of known text (reliability 1.4, 1.6).

    python -m benchmarks.robustness.deaths --repeats 5 --write
    python -m benchmarks.robustness.deaths --kinds rank --serve "--tensor-parallel 4" --write FILE

Two API processes, one core, the bundled model with --deterministic (a batch of 50 may round otherwise than one alone);
a new server for each repeat, for one whose core dies often gives up. In each cell `streams` greedy streams are begun,
then one process of the kind gets the signal. `whole`: ended as usual with the known text; `error_event`: ended by an
error event and the end mark; `cut`: the connection ended without one;
`wrong`: a text that is not the known one; `refused`: answered 503 with Retry-After before it began. `noticed_s` is the
time from the signal until the process is gone from the tree, `over_s` until the last stream that it hurt has ended, and
`back_s` until a new stream has given the known text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.robustness.serving import BYSTANDER_PROMPTS, ROLES, server

KINDS = ("core", "api", "templates", "stream guard", "rank")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
NOTICED_S = 1.0
PATIENCE_S = 60.0
PERIOD_S = 0.01


class Stream:
    """One greedy streamed chat on a connection of its own, whatever becomes of it."""

    def __init__(self, base: str, number: int, max_tokens: int) -> None:
        self.number = number
        self.text = ""
        self.outcome = "hangs"
        self.ended_at = 0.0
        self.begun = asyncio.Event()
        self._body = {
            "stream": True, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True,
            "messages": [{"role": "user", "content": BYSTANDER_PROMPTS[number]}],
        }  # fmt: skip
        self.task = asyncio.create_task(self._run(base))

    async def _run(self, base: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S), _session(base) as session:
                self.outcome = await self._read(session)
        except aiohttp.ClientError:
            self.outcome = "cut"
        except TimeoutError:
            pass
        self.ended_at = time.monotonic()
        self.begun.set()

    async def _read(self, session: aiohttp.ClientSession) -> str:
        failed = done = False
        async with session.post("/v1/chat/completions", json=self._body) as response:
            if response.status != 200:
                told = response.status == 503 and "Retry-After" in response.headers
                return "refused" if told else f"status {response.status}"
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    failed = failed or "error" in chunk
                    for choice in chunk.get("choices", ()):
                        self.text += choice["delta"].get("content") or ""
                    self.begun.set()
        if not done:
            return "cut"
        return "error_event" if failed else "whole"


@contextlib.asynccontextmanager
async def _session(base: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(base, connector=connector) as session:
        yield session


def of_kind(supervisor: psutil.Process, kind: str) -> list[psutil.Process]:
    """The processes of a kind that run now."""
    part = next(part for part, role in ROLES.items() if role == kind)
    found = []
    for process in supervisor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(part in word for word in process.cmdline()):
                found.append(process)
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended (a status that nobody has read yet does not count)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Cell:
    """One kind and one signal: what became of all streams, and the greatest times."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.outcomes: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"noticed_s": [], "over_s": [], "back_s": []}
        self.problems: list[str] = []

    def row(self) -> dict[str, Any]:
        """The row of the table."""
        times = {name: round(max(each), 2) if each else None for name, each in self.seconds.items()}
        return {
            "process": self.kind, "signal": self.name, "repeats": len(self.seconds["back_s"]),
            "outcomes": dict(self.outcomes), **times, "problems": self.problems[:3],
        }  # fmt: skip


class Run:
    """The whole run on one server; `golden`: what each prompt's stream says."""

    def __init__(self, base: str, supervisor: psutil.Process, given: argparse.Namespace) -> None:
        self.base, self.supervisor = base, supervisor
        self.streams, self.tokens = given.streams, given.tokens
        self.golden: list[str] = []

    async def learn(self) -> None:
        """The texts without any death."""
        for number in range(len(BYSTANDER_PROMPTS)):
            stream = Stream(self.base, number, self.tokens)
            await stream.task
            while stream.outcome == "refused":  # the other API process is not ready yet
                await asyncio.sleep(PERIOD_S)
                stream = Stream(self.base, number, self.tokens)
                await stream.task
            assert stream.outcome == "whole", stream.outcome
            self.golden.append(stream.text)

    async def hit(self, cell: Cell) -> None:
        """One death under streams."""
        victims = of_kind(self.supervisor, cell.kind)
        if not victims:
            cell.problems.append("no such process runs")
            return
        count = len(BYSTANDER_PROMPTS)
        streams = [Stream(self.base, i % count, self.tokens) for i in range(self.streams)]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        began = time.monotonic()
        victims[0].send_signal(SIGNALS[cell.name])
        noticing = asyncio.create_task(self._noticed(victims[0], cell, began))
        await asyncio.gather(*(stream.task for stream in streams))
        for stream in streams:
            self._judge(stream, cell, began)
        await noticing
        cell.seconds["back_s"].append(await self._back() - began)

    async def _noticed(self, victim: psutil.Process, cell: Cell, began: float) -> None:
        """A template worker that stands idle is replaced by who needs it next: no stream waits for it."""
        if cell.kind == "templates":
            return
        while not is_gone(victim):
            if time.monotonic() - began > PATIENCE_S:
                cell.problems.append("the process was never replaced")
                return
            await asyncio.sleep(PERIOD_S)
        cell.seconds["noticed_s"].append(time.monotonic() - began)

    def _judge(self, stream: Stream, cell: Cell, began: float) -> None:
        outcome = stream.outcome
        golden = self.golden[stream.number]
        wrong = stream.text != golden if outcome == "whole" else not golden.startswith(stream.text)
        outcome = "wrong" if wrong else outcome
        cell.outcomes[outcome] += 1
        if outcome in ("cut", "error_event"):
            cell.seconds["over_s"].append(stream.ended_at - began)
        if outcome not in ("whole", "error_event", "refused"):
            cell.problems.append(f"{outcome}: {stream.text[-80:]!r}")

    async def _back(self) -> float:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            stream = Stream(self.base, 0, self.tokens)
            await stream.task
            if stream.outcome == "whole" and stream.text == self.golden[0]:
                return time.monotonic()
            await asyncio.sleep(PERIOD_S)
        return end


async def run(
    base: str, supervisor: psutil.Process, given: argparse.Namespace, cells: list[Cell]
) -> None:
    """Every cell once."""
    whole = Run(base, supervisor, given)
    await whole.learn()
    for cell in cells:
        await whole.hit(cell)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:4])
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=tuple(SIGNALS))
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument("--write", type=Path, nargs="?", const=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    cells = [Cell(kind, name) for kind in given.kinds for name in given.signals]
    for _ in range(given.repeats):
        with server("--deterministic", "--api-servers", "2", *given.serve.split()) as (
            base,
            supervisor,
        ):
            asyncio.run(run(base, supervisor, given, cells))
    rows = [cell.row() for cell in cells]
    report = {
        "streams": given.streams, "tokens": given.tokens,
        "load_average": [round(x, 1) for x in os.getloadavg()], "rows": rows,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if given.write:
        given.write.write_text(json.dumps(report, indent=1) + "\n")
    late = [row for row in rows if (row["noticed_s"] or 0.0) > NOTICED_S]
    return 1 if late or any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
