"""Thousands of mixed requests, each with constraints of its own, against the same requests alone (P17).

    python -m benchmarks.robustness.canary --requests 10000 --write

Every request is drawn with a seed and a random set of features (allowed ids, bad words, biases, penalties, truncation,
DRY, XTC, min_tokens, log-probabilities), run alone first, then many times among all the others in random order, some of
them beside requests that are cut. The token ids must be the same each time, and none may lie outside an allowed list.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.robustness.serving import BYSTANDER_PROMPTS, at_rest, server

DISTINCT = 200
AT_ONCE = 48


def make_body(number: int, seed: int) -> dict[str, Any]:
    """A request with two or three features; what it may answer depends on nothing else."""
    random_ = random.Random(f"{seed}/{number}")
    ids = random_.sample(range(300, 4000), 40)
    features: list[dict[str, Any]] = [
        {"allowed_token_ids": sorted(ids)},
        {"bad_words": ["the", "a", "fox"]},
        {"logit_bias": {str(i): random_.uniform(-5, 5) for i in ids}},
        {"presence_penalty": random_.uniform(-1, 2), "frequency_penalty": random_.uniform(0, 1)},
        {"repetition_penalty": random_.uniform(1, 1.5)},
        {"top_k": random_.randint(1, 50)},
        {"top_p": random_.uniform(0.3, 1)},
        {"min_p": 0.05},
        {"typical_p": 0.8},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.5},
        {"min_tokens": 4},
        {"logprobs": 3},
    ]
    body: dict[str, Any] = {
        "prompt": random_.choice(BYSTANDER_PROMPTS) + " x" * random_.choice([0, 3, 40]),
        "max_tokens": random_.randint(4, 16),
        "temperature": random_.choice([0.0, 0.7, 1.0, 1.3]),
        "seed": number,
        "return_token_ids": True,
    }
    for feature in random_.sample(features, random_.randint(1, 3)):
        body |= feature
    return body


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    """The token ids of the answer (and why it ended)."""
    async with session.post("/v1/completions", json=body) as response:
        document = await response.json()
        if response.status != 200:
            return document
        choice = document["choices"][0]
        return [choice["token_ids"], choice["finish_reason"]]


async def run(base: str, requests: int, seed: int) -> dict[str, Any]:
    bodies = [make_body(number, seed) for number in range(min(DISTINCT, requests))]
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    wrong: list[str] = []
    outside = tokens = 0
    async with aiohttp.ClientSession(base, timeout=timeout, connector=connector) as session:
        alone = [await ask(session, body) for body in bodies]
        order = [i % len(bodies) for i in range(requests)]
        random.Random(seed).shuffle(order)
        todo = iter(order)

        async def user(number: int) -> None:
            nonlocal outside, tokens
            random_ = random.Random(f"{seed}/user/{number}")
            for i in todo:
                if random_.random() < 0.05:
                    try:
                        async with asyncio.timeout(0.02):
                            await ask(session, {**bodies[i], "max_tokens": 200})
                    except TimeoutError:
                        pass
                found = await ask(session, bodies[i])
                if found != alone[i]:
                    wrong.append(f"{bodies[i]}: {found} instead of {alone[i]}")
                elif isinstance(found, list):
                    tokens += len(found[0])
                    allowed = bodies[i].get("allowed_token_ids")
                    outside += 0 if allowed is None else len(set(found[0]) - {*allowed})

        begin = time.monotonic()
        await asyncio.gather(*(user(i) for i in range(AT_ONCE)))
        rest = await at_rest(session)
    return {
        "requests": requests, "distinct": len(bodies), "at_once": AT_ONCE, "seed": seed,
        "refused_alone": [found for found in alone if not isinstance(found, list)][:2],
        "tokens": tokens, "wall_s": round(time.monotonic() - begin, 1),
        "mismatches": len(wrong), "first_mismatch": wrong[:1], "tokens_outside_allowed": outside,
        "leaked_blocks": rest["total_blocks"] - rest["free_blocks"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    with server(*given.serve.split()) as (base, _):
        report = asyncio.run(run(base, given.requests, given.seed))
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    held = report["mismatches"] or report["tokens_outside_allowed"] or report["leaked_blocks"]
    return 1 if held or report["refused_alone"] else 0


if __name__ == "__main__":
    sys.exit(main())
