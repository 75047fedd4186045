"""Streams beside one request of 256 prompts of 1,500 tokens: what they wait for it (reliability 1.17).

    python -m benchmarks.robustness.wide [--prompts 256] [--tokens 1500]

`gap` are the pauses between the chunks of a stream that runs all the time, `first` the times to the first chunk of
short ones that are sent one after the other. `alone` is before, `beside` while the wide request runs (`wide_s`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from benchmarks.robustness.crowd import percentiles
from benchmarks.robustness.serving import at_rest, server


async def stream(session: aiohttp.ClientSession, tokens: int) -> list[float]:
    """The milliseconds to the first chunk and between the others."""
    body = {
        "prompt": "Tell me a story", "max_tokens": tokens, "min_tokens": tokens, "stream": True
    }  # fmt: skip
    gaps, last = [], time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b'data: {"id'):
                now = time.perf_counter()
                gaps.append(1000 * (now - last))
                last = now
    return gaps


async def streams_until(session: aiohttp.ClientSession, end: asyncio.Event) -> dict[str, Any]:
    """A long stream over and over beside short ones, until `end`."""
    gaps: list[float] = []
    first: list[float] = []

    async def long() -> None:
        while not end.is_set():
            gaps.extend((await stream(session, 200))[1:])

    async def short() -> None:
        while not end.is_set():
            first.extend((await stream(session, 2))[:1])
            await asyncio.sleep(0.05)

    await asyncio.gather(long(), short())
    return {"gap": percentiles(gaps), "first": percentiles(first)}


async def run(base: str, given: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(base, timeout=timeout) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        ended = asyncio.Event()
        asyncio.get_running_loop().call_later(5, ended.set)
        alone = await streams_until(session, ended)
        ended = asyncio.Event()
        items = [
            [5 + (i * 31 + j) % 200 for j in range(given.tokens)] for i in range(given.prompts)
        ]
        body = {"model": model, "query": [7, 8], "items": items, "label_token_ids": [5, 6]}
        began = time.perf_counter()

        async def wide() -> int:
            async with session.post("/generative_scoring", json=body) as response:
                await response.read()
                ended.set()
                return response.status

        status, beside = await asyncio.gather(wide(), streams_until(session, ended))
        wide_s = time.perf_counter() - began
        rest = await at_rest(session)
    return {
        "status": status, "wide_s": round(wide_s, 1), "alone": alone, "beside": beside,
        "leaked_blocks": rest["total_blocks"] - rest["free_blocks"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1500)
    given = parser.parse_args()
    with server("demo/model") as (base, _):
        report = asyncio.run(run(base, given))
    print(json.dumps(report, indent=1))
    return 0 if report["status"] == 200 and not report["leaked_blocks"] else 1


if __name__ == "__main__":
    sys.exit(main())
