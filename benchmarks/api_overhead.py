"""What the API process costs: latency at one stream, tokens streamed by many, small chats admitted.

    python -m benchmarks.api_overhead [--write]

One API process over the null executor, whose step takes no time of its own; so all that is seen is the way through
HTTP, template, tokenizer, socket, scheduler, detokenizer and back. The clients, another process, only count. Where a
machine has fewer cores than there are processes the wall clock measures the machine: tokens and requests are
therefore also told per second of the API process's own processor time, which is what one core can do. `tokens a
chunk` is 1 where nothing was merged; the paced row offers tokens at the wanted rate, so that falling behind would
show there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvloop

from benchmarks.robustness.serving import children, null_model, server
from headrace.bench.report import markdown_table, processor_name

ROUTE = "/v1/chat/completions"
CHAT = {"temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
STREAMED = {**CHAT, "stream": True, "ignore_eos": True}
ADDED_MS, TOKENS_S, REQUESTS_S = 3.0, 40_000, 1_500
STREAMS = 64
TOKENS = 1024
HEADER = (
    "what",
    "measured",
    "by the wall clock",
    "per second of the API's processor time",
    "wanted",
)
Row = tuple[str, str, str, str, str]


@dataclass
class Client(asyncio.Protocol):
    """One kept connection that sends the same request again and again and counts what comes back."""

    host: str
    request: bytes
    streams: bool
    chunks: int = 0
    answers: int = 0
    arrived: list[float] = field(default_factory=list)
    _tail: bytes = b""
    _done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.streams and (found := data.count(b'"content":')):
            self.chunks += found
            self.arrived.append(time.perf_counter())
        self._tail = (self._tail + data)[-16:] if len(data) < 16 else data[-16:]
        ended = self._tail.endswith(b"0\r\n\r\n") if self.streams else data.endswith(b"}")
        if data.startswith(b"HTTP/1.1 ") and b" 200 " not in data[:16]:
            self._fail(data)
        elif ended and self._done is not None and not self._done.done():
            self.answers += 1
            self._done.set_result(None)

    def _fail(self, data: bytes) -> None:
        assert self._done is not None
        self._done.set_exception(AssertionError(data.decode(errors="replace")))

    async def ask(self) -> None:
        """One request, until its answer has ended."""
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(self.request)
        await self._done


async def connected(url: str, body: dict[str, object]) -> Client:
    """A client with an open connection."""
    place = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {ROUTE} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: Client(place.netloc, head.encode() + content, bool(body.get("stream"))),
        place.hostname,
        place.port,
    )
    return client


@dataclass(frozen=True)
class Spent:
    """Seconds of a run: by the wall clock, and of the API process."""

    wall_s: float
    api_s: float


async def spending(api: psutil.Process, work: Callable[[], Awaitable[None]]) -> Spent:
    """Runs `work`."""
    began, before = time.perf_counter(), api.cpu_times()
    await work()
    after = api.cpu_times()
    used = after.user + after.system - before.user - before.system
    return Spent(time.perf_counter() - began, used)


async def one_stream(url: str, repeats: int) -> Row:
    """The whole way of a chat of one token, there and back."""
    client = await connected(url, {**CHAT, "max_tokens": 1, "ignore_eos": True})
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        await client.ask()
        took.append((time.perf_counter() - began) * 1000)
    p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
    said = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    return ("a chat of one token at 1 stream, there and back", said, "", "", f"{ADDED_MS:g} ms")


async def one_paced(url: str, step_s: float) -> Row:
    """What a stream adds to its tokens: the time between them less that of a step."""
    client = await connected(url, {**STREAMED, "max_tokens": 256})
    await client.ask()
    client.arrived.clear()
    began = time.perf_counter()
    await client.ask()
    first = (client.arrived[1] - began) * 1000
    gaps = [b - a for a, b in zip(client.arrived[1:], client.arrived[2:], strict=False)]
    added = (statistics.median(gaps) - step_s) * 1000
    said = f"{added:.2f} ms between tokens, {first - step_s * 1000:.2f} ms before the first"
    return (
        f"what 1 stream adds to steps of {step_s * 1000:g} ms (p50)",
        *(said, "", "", f"{ADDED_MS:g} ms"),
    )


async def admitted(url: str, api: psutil.Process, seconds: float) -> Row:
    """Small chats over 64 kept connections, each with one token."""
    body = {**CHAT, "max_tokens": 1, "ignore_eos": True}
    clients = [await connected(url, body) for _ in range(STREAMS)]
    await asyncio.gather(*(client.ask() for client in clients))

    async def ask(client: Client, until: float) -> None:
        while time.perf_counter() < until:
            await client.ask()

    async def work() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(ask(client, until) for client in clients))

    for client in clients:
        client.answers = 0
    spent = await spending(api, work)
    count = sum(client.answers for client in clients)
    return (
        f"chats of one token over {STREAMS} connections",
        f"{count} requests",
        f"{count / spent.wall_s:,.0f} a second",
        f"{count / spent.api_s:,.0f}",
        f"{REQUESTS_S:,}",
    )


async def streamed(url: str, api: psutil.Process, *, step_s: float) -> Row:
    """64 streams at once."""
    body = {**STREAMED, "max_tokens": TOKENS}
    clients = [await connected(url, body) for _ in range(STREAMS)]

    async def work() -> None:
        await asyncio.gather(*(client.ask() for client in clients))

    await work()
    for client in clients:
        client.chunks = 0
    spent = await spending(api, work)
    tokens = STREAMS * TOKENS
    chunks = sum(client.chunks for client in clients) - STREAMS  # the first chunk holds the role
    pace = f"{STREAMS / step_s:,.0f} tokens a second offered" if step_s else "as fast as it goes"
    return (
        f"{STREAMS} streams, {pace}",
        f"{tokens / chunks:.2f} tokens a chunk",
        f"{tokens / spent.wall_s:,.0f} tokens",
        f"{tokens / spent.api_s:,.0f} tokens, {chunks / spent.api_s:,.0f} chunks",
        f"{TOKENS_S:,}",
    )


@contextmanager
def served(step_s: float) -> Iterator[tuple[str, psutil.Process]]:
    """A server whose steps take `step_s`, and its API process."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = null_model(Path(folder), step_s=step_s)
        quiet = ("--response-store", "off", "--max-requests-per-key", "1024")
        with server(*arguments, *quiet) as (url, supervisor):
            (api,) = (pid for pid, line in children(supervisor).items() if "server.process" in line)
            yield url, psutil.Process(api)


def table(seconds: float) -> str:
    """All rows."""
    rows: list[Row] = []
    with served(0.0) as (url, api):
        rows.append(uvloop.run(one_stream(url, 1000)))
        rows.append(uvloop.run(admitted(url, api, seconds)))
        rows.append(uvloop.run(streamed(url, api, step_s=0.0)))
    step_s = STREAMS / TOKENS_S
    with served(step_s) as (url, api):
        rows.insert(3, uvloop.run(streamed(url, api, step_s=step_s)))
    with served(0.01) as (url, _):
        rows.insert(1, uvloop.run(one_paced(url, 0.01)))
    about = (
        f"One API process, null executor, {processor_name()}, {psutil.cpu_count()} cores for server and clients "
        f"together, load {os.getloadavg()[0]:.0f} while it ran, Python {platform.python_version()}. "
        "Made by `python -m benchmarks.api_overhead --write`.\n\n"
    )
    return f"# What the API process costs\n\n{about}{markdown_table(HEADER, rows)}\n"


def main() -> None:
    """Prints the table; --write stores it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    made = table(given.seconds)
    print(made)
    if given.write:
        Path(__file__).with_suffix(".md").write_text(made)


if __name__ == "__main__":
    main()
