"""`headrace render` with the bundled model: time until it takes requests, memory, requests over HTTP and gRPC.

`python -m benchmarks.render --write` writes render.md. Times are of this machine, which may be shared: the least and
the median of the starts are told.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil

from headrace.bench.report import markdown_table, versions
from headrace.front.server.grpc.render import SERVICE

PLACE = Path(__file__).with_suffix(".md")
CHAT = {
    "messages": [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "The mill wheel turns in the headrace. " * 40},
    ]
}
STREAMS = 8


class Renderer:
    """A running `headrace render` and the time it took to be ready."""

    def __init__(self) -> None:
        began = time.perf_counter()
        words = ["render", "--port", "0", "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        said = [self.process.stdout.readline() for _ in range(2)]
        self.ready_s = time.perf_counter() - began
        self.grpc = said[0].rpartition(" ")[2].strip()
        self.http = re.findall(r"http://\S+", said[1])[0]
        self.mib = psutil.Process(self.process.pid).memory_info().rss / 2**20

    def close(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait()


def over_http(url: str) -> Callable[[], int]:
    """A call that renders the chat and tells the number of its tokens."""
    client = httpx.Client(base_url=url)

    def call() -> int:
        return len(client.post("/v1/chat/completions/render", json=CHAT).json()["token_ids"])

    return call


def over_grpc(address: str) -> Callable[[], int]:
    """The same over gRPC."""
    channel = grpc.insecure_channel(address)
    request = SERVICE.request("RenderChat")()
    for one in CHAT["messages"]:
        request.messages.append(json.dumps(one))
    render = channel.unary_unary(
        f"/{SERVICE.full_name}/RenderChat",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=SERVICE.response("RenderChat").FromString,
    )
    return lambda: len(render(request).token_ids)


def rates(makes: Callable[[], Callable[[], int]], seconds: float) -> tuple[float, float, float]:
    """Requests and tokens per second of STREAMS callers, and the median milliseconds of one caller alone."""
    alone, times = makes(), []
    tokens = alone()
    for _ in range(50):
        began = time.perf_counter()
        alone()
        times.append(time.perf_counter() - began)
    calls = [makes() for _ in range(STREAMS)]
    end = time.perf_counter() + seconds

    def keep_on(call: Callable[[], int]) -> int:
        count = 0
        while time.perf_counter() < end:
            call()
            count += 1
        return count

    with ThreadPoolExecutor(STREAMS) as pool:
        count = sum(pool.map(keep_on, calls))
    return count / seconds, count * tokens / seconds, 1000 * statistics.median(times)


def table(starts: int, seconds: float) -> str:
    """The page."""
    ready = []
    for _ in range(starts):
        renderer = Renderer()
        ready.append(renderer.ready_s)
        renderer.close()
    renderer = Renderer()
    try:
        http = rates(lambda: over_http(renderer.http), seconds)
        remote = rates(lambda: over_grpc(renderer.grpc), seconds)
        after = psutil.Process(renderer.process.pid).memory_info().rss / 2**20
    finally:
        renderer.close()
    rows = [
        ("ready, least of the starts", f"{min(ready):.2f} s", "under 2 s"),
        ("ready, median", f"{statistics.median(ready):.2f} s", ""),
        ("memory when ready", f"{renderer.mib:.0f} MiB", "under 150 MB"),
        ("memory after the load below", f"{after:.0f} MiB", ""),
        *(
            row
            for name, (requests, tokens, one_ms) in (("HTTP", http), ("gRPC", remote))
            for row in (
                (f"{name}: one chat, one caller, median", f"{one_ms:.1f} ms", ""),
                (f"{name}: {STREAMS} callers", f"{requests:.0f} requests/s, {tokens:.0f} tokens/s", ""),
            )
        ),
    ]  # fmt: skip
    head = [
        "# `headrace render`: no weights, no device, no torch",
        "",
        f"Made by `python -m benchmarks.render --write`: {starts} starts with the bundled model's tokenizer, on a "
        "shared machine.",
        ", ".join(f"{name} {value}" for name, value in versions().items()) + ".",
        "",
    ]
    return "\n".join([*head, markdown_table(("what", "here", "bar"), rows), ""])


def main() -> None:
    """Prints the page, and writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    page = table(given.starts, given.seconds)
    print(page)
    if given.write:
        PLACE.write_text(page)


if __name__ == "__main__":
    main()
