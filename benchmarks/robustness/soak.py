"""Mixed requests, a third of them cut at a random moment: memory flat, every block back (1.1, 1.11).

python -m benchmarks.robustness.soak --requests 5000
python -m benchmarks.robustness.soak --requests 10000 --demo mixture    # experts, latents, recurrent state
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.robustness.serving import BYSTANDER_PROMPTS, at_rest, resident_mib, server


def make_body(random_: random.Random) -> tuple[str, dict[str, Any]]:
    """A valid request of random shape."""
    sampling = random_.choice(
        [
            {"temperature": 0},
            {"temperature": 1, "seed": 7},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        ]
    )
    body: dict[str, Any] = {
        "max_tokens": random_.randint(1, 64),
        "stream": random_.random() < 0.6,
        **sampling,
    }
    extra = random_.choice(
        [{}, {}, {"n": 3, "temperature": 1}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["the", "."]},
         {"presence_penalty": 0.5}, {"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 1, "top_k": 0}]
    )  # fmt: skip
    text = random_.choice(BYSTANDER_PROMPTS) + " x" * random_.choice([0, 10, 200, 1500])
    if random_.random() < 0.3:
        extra = {
            k: (2 if v is True else v)
            for k, v in extra.items()
            if k not in ("top_logprobs", "use_beam_search")
        }
        return "/v1/completions", {**body, **extra, "prompt": text}
    return "/v1/chat/completions", {
        **body,
        **extra,
        "messages": [{"role": "user", "content": text}],
    }


async def one(session: aiohttp.ClientSession, random_: random.Random, seen: Counter[str]) -> None:
    """One request, read to its end or cut."""
    path, body = make_body(random_)
    cut_s = random_.choice([0.01, 0.05, 0.3]) if random_.random() < 0.34 else 300.0
    try:
        async with asyncio.timeout(cut_s), session.post(path, json=body) as response:
            text = await response.read()
            seen[
                "error event"
                if b'"error":' in text and response.status == 200
                else str(response.status)
            ] += 1
            if response.status not in (200, 503, 429):
                print(response.status, path, body, text[:300], file=sys.stderr)
    except TimeoutError:
        seen["cut"] += 1


async def run(base: str, supervisor: Any, requests: int, seed: int) -> dict[str, Any]:
    """The whole run; memory is read at rest after each tenth."""
    seen: Counter[str] = Counter()
    rest_mib: list[int] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        base, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        start = await at_rest(session)
        for tenth in range(10):
            todo = iter(range(requests // 10))

            async def user(number: int, tenth: int = tenth, todo: Any = todo) -> None:
                random_ = random.Random(f"{seed}/{tenth}/{number}")
                for _ in todo:
                    await one(session, random_, seen)

            await asyncio.gather(*(user(i) for i in range(24)))
            rest = await at_rest(session)
            rest_mib.append(round(resident_mib(supervisor)))
        return {
            "requests": requests,
            "outcomes": dict(seen),
            "rss_mib_at_rest": rest_mib,
            "start": start,
            "end": rest,
        }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--demo", default="", help="the small model of this name")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    # A small KV pool fills early (cached prefixes touch its pages one by one): what grows afterwards is a leak.
    model = ("--demo", given.demo) if given.demo else ()
    with server("--kv-memory", "64MiB", *model) as (base, supervisor):
        report = asyncio.run(run(base, supervisor, given.requests, given.seed))
    print(json.dumps(report, indent=1))
    if given.write:
        name = "_".join(("soak", given.demo) if given.demo else ("soak",))
        Path(__file__).with_name(f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    end, start = report["end"], report["start"]
    held = (
        end.get("running")
        or end.get("waiting")
        or end.get("free_blocks") != start.get("free_blocks")
    )
    return 1 if held else 0


if __name__ == "__main__":
    sys.exit(main())
