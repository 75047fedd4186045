"""Grown bodies whose clients leave at random moments: what the server holds afterwards (security P9, P21).

    python -m benchmarks.robustness.bodies --bodies 1000 --write

Bodies of 64 KiB to `--largest` MiB go to the routes that read, tokenize, render, derender and embed, over 16
connections; two in three clients leave: while they send, or within half a second after. The rest wait for the answer.
Memory is that of the processes of each role, before, at its greatest (looked at ten times a second) and once the server
has been at rest for `--rest-s`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.robustness.fuzz import gone
from benchmarks.robustness.serving import at_rest, children, resident_by_role, server

SENDERS = 16
BACK_MIB = 64
PIECE = 1 << 16
TEXTS = ("a", "word ", " ", "\n", "é", "🙂", "0", "<|im_end|>", "aB3$")


def grown(rng: random.Random, size: int) -> tuple[str, bytes]:
    """A route and a body of about `size` bytes."""
    text = rng.choice(TEXTS)
    text *= max(1, size // len(text.encode()))
    message = {"role": "user", "content": text}
    ids = [rng.randrange(3, 400)] * (size // 5)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [message]}),
        ("/detokenize", {"tokens": ids}),
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/completions", {"prompt": ids, "max_tokens": 1, "truncate_prompt_tokens": 8}),
        ("/v1/chat/completions", {"messages": [message], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [message] * 2, "truncate_prompt_tokens": 8}),
        ("/v1/messages", {"messages": [message], "max_tokens": 1}),
        ("/v1/responses", {"input": text, "max_output_tokens": 1, "store": False}),
        ("/v1/completions/derender", {"choices": [{"index": 0, "token_ids": ids}]}),
        ("/v1/messages/count_tokens", {"messages": [message]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "user": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * (size // 32)}),
    ]
    path, document = rng.choice(kinds)
    return path, json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()


async def one(port: int, rng: random.Random, size: int) -> str:
    """One client's request and how it ended: a status, or "left"."""
    path, body = grown(rng, size)
    leaves = rng.choice(("sending", "waiting", "never"))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        part = rng.random() if leaves == "sending" else 1.0
        await _send(writer, head + body[: int(part * len(body))])
        if leaves == "sending":
            return "left"
        patience = rng.uniform(0, 0.5) if leaves == "waiting" else 120.0
        line = await asyncio.wait_for(reader.readline(), patience)
        return line.split(b" ")[1].decode() if line else "no answer"
    except TimeoutError:
        return "left" if leaves == "waiting" else "hangs"
    except ConnectionError:
        return "closed early"
    finally:
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    for start in range(0, len(data), PIECE):
        writer.write(data[start : start + PIECE])
        await writer.drain()


async def watch(supervisor: psutil.Process, peak: dict[str, int]) -> None:
    """Keeps the greatest memory of each role, and of all."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            roles = resident_by_role(supervisor)
            for role, mib in {**roles, "all": sum(roles.values())}.items():
                peak[role] = max(peak.get(role, 0), mib)
        await asyncio.sleep(0.1)


async def run(base: str, supervisor: psutil.Process, given: argparse.Namespace) -> dict[str, Any]:
    port = int(base.rpartition(":")[2])
    rng = random.Random(given.seed)
    sizes = [
        int(rng.uniform(256, (given.largest * 2**20) ** 0.5) ** 2) for _ in range(given.bodies)
    ]
    todo, statuses = iter(enumerate(sizes)), Counter[str]()

    async def sender() -> None:
        for number, size in todo:
            own = random.Random(f"{given.seed}/{number}")
            statuses[await one(port, own, size)] += 1

    async with aiohttp.ClientSession(base) as session:
        await asyncio.gather(*(one(port, random.Random(i), 1 << 16) for i in range(SENDERS)))
        await at_rest(session)
        processes, before = children(supervisor), resident_by_role(supervisor)
        peak: dict[str, int] = {}
        watching = asyncio.create_task(watch(supervisor, peak))
        began = time.monotonic()
        await asyncio.gather(*(sender() for _ in range(SENDERS)))
        seconds = time.monotonic() - began
        rest = await at_rest(session, timeout_s=60)
        await asyncio.sleep(given.rest_s)
        watching.cancel()
        after = resident_by_role(supervisor)
    return {
        "bodies": given.bodies, "seed": given.seed, "mib_sent_at_most": sum(sizes) >> 20,
        "largest_mib": given.largest, "seconds": round(seconds, 1),
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "ends": dict(sorted(statuses.items())), "restarts": gone(processes, children(supervisor)),
        "running_waiting": [rest.get("running"), rest.get("waiting")],
        "rss_mib": {"before": before, "peak": peak, "after": after},
        "kept_mib": sum(after.values()) - sum(before.values()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bodies", type=int, default=1000)
    parser.add_argument("--largest", type=int, default=24, help="MiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    # A small KV pool: cached prefixes touch its pages one by one, which is no growth.
    with server("--kv-memory", "128MiB") as (base, supervisor):
        report = asyncio.run(run(base, supervisor, given))
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    ends = report["ends"]
    bad = {"hangs", "no answer"} & ends.keys() or any(end in ends for end in ("500", "502"))
    whole = not bad and not report["restarts"] and report["running_waiting"] == [0, 0]
    return 0 if whole and report["kept_mib"] <= BACK_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
