"""Open-loop load at 0.5 to 20 times the capacity, from four keys (reliability 1.2, ENG-06).

    python -m benchmarks.robustness.overload --seconds 20 --write [--deadline-s 2]

With --deadline-s every request has so much time (X-Request-Timeout-S), the queue holds a thousand and is in the order
in which requests are due; those answered 504 are `late`. The report is then overload_deadline_SECONDS.json.

The null executor's time per step is fixed: ROWS requests of TOKENS tokens at STEP_S a step are NOMINAL requests a
second, of which the levels are multiples. The capacity is what the server was measured to do when it always has work
(twice ROWS clients that ask again and again, no deadline); it is less by one step a request, as a row's last step is
in flight while the next one is planned. `of_capacity` is the goodput over it, or over what was sent if that is less,
of what was done between SETTLED_S after the begin and the end of the sending.
Requests come at random times whatever becomes of them. `ledger` is sent = ok + refused + failed + lost; `retried` is
the stock client's success within three tries at 1.2 times the capacity. Two controls tell the server from the machine:
`client_lag_p99_ms` is how late the client itself woke from short sleeps meanwhile (it cannot see an answer sooner), and
`api_cpu_ms_per_request` what a request cost the API process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import psutil

from benchmarks.robustness.serving import at_rest, children, null_model, resident_mib, server

STEP_S, ROWS, TOKENS, QUEUE = 0.05, 4, 8, 8
NOMINAL = ROWS / (TOKENS * STEP_S)  # requests a second
SETTLED_S = 2.0
CAPACITY_S, RETRIED_S = 10.0, 20.0
LEVELS = (0.5, 1, 2, 5, 20)
KEYS = [f"key-{i}" for i in range(4)]
BODY = {"prompt": "fox", "max_tokens": TOKENS, "min_tokens": TOKENS}


class Tally:
    """What became of the requests of one level."""

    def __init__(self, deadline_s: float | None) -> None:
        self._timeout = {} if deadline_s is None else {"X-Request-Timeout-S": str(deadline_s)}
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.ok_at: list[float] = []
        self.ok_by_key: Counter[str] = Counter()
        self.refused_ms: list[float] = []
        self.with_retry_after = 0

    async def one(self, session: aiohttp.ClientSession, key: str) -> None:
        self.sent += 1
        begin = time.perf_counter()
        headers = {"Authorization": f"Bearer {key}", **self._timeout}
        try:
            async with session.post("/v1/completions", json=BODY, headers=headers) as response:
                document = await response.json()
                kind = "ok" if response.status == 200 else "refused"
                if kind == "ok" and document["usage"]["completion_tokens"] != TOKENS:
                    kind = "lost"
                elif response.status in (429, 503):
                    self.with_retry_after += "Retry-After" in response.headers
                    self.refused_ms.append(1000 * (time.perf_counter() - begin))
                if response.status not in (200, 429, 503):
                    kind = "late" if response.status == 504 else "failed"
                self.outcomes[kind] += 1
                if kind == "ok":
                    self.ok_by_key[key] += 1
                    self.ok_at.append(time.perf_counter())
        except aiohttp.ClientError:
            self.outcomes["lost"] += 1


async def lag_ms(found: list[float]) -> None:
    """How late this process wakes from a sleep, over and over."""
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        found.append(1000 * (time.perf_counter() - due))


def api_cpu_s(supervisor: psutil.Process) -> float:
    """Processor seconds of the API process so far."""
    (pid,) = (pid for pid, line in children(supervisor).items() if "server.process" in line)
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def at_level(
    session: aiohttp.ClientSession,
    level: float,
    seconds: float,
    supervisor: psutil.Process,
    deadline_s: float | None,
    capacity: float,
) -> dict[str, Any]:
    """Poisson arrivals at `level` times the nominal capacity; the figures of it."""
    random_, tally, tasks = random.Random(level), Tally(deadline_s), []
    lags: list[float] = []
    lagging = asyncio.create_task(lag_ms(lags))
    cpu_s = api_cpu_s(supervisor)
    begin = time.perf_counter()
    due = 0.0
    while (due := due + random_.expovariate(level * NOMINAL)) < seconds:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        tasks.append(asyncio.create_task(tally.one(session, random_.choice(KEYS))))
    sent_until = time.perf_counter()
    await asyncio.gather(*tasks)
    wall = time.perf_counter() - begin
    lagging.cancel()
    settled = [ended for ended in tally.ok_at if begin + SETTLED_S < ended <= sent_until]
    settled_req_s = len(settled) / max(sent_until - begin - SETTLED_S, 1e-3)
    shares = np.array([tally.ok_by_key[key] for key in KEYS], float)
    return {
        "level": level, "sent": tally.sent, "ledger": dict(tally.outcomes),
        "goodput_req_s": round(tally.outcomes["ok"] / wall, 2),
        "of_capacity": round(settled_req_s / min(capacity, tally.sent / seconds), 3),
        "refused_p99_ms": round(float(np.percentile(tally.refused_ms, 99)), 1) if tally.refused_ms else None,
        "client_lag_p99_ms": round(float(np.percentile(lags, 99)), 1),
        "api_cpu_ms_per_request": round(1000 * (api_cpu_s(supervisor) - cpu_s) / max(tally.sent, 1), 2),
        "refused_with_retry_after": tally.with_retry_after,
        "jain": round(float(shares.sum() ** 2 / (len(shares) * (shares**2).sum())), 3),
    }  # fmt: skip


async def measured_capacity(session: aiohttp.ClientSession, seconds: float) -> float:
    """Requests a second while twice as many clients as rows ask again and again, behind SETTLED_S."""
    tally, begin = Tally(None), time.perf_counter()

    async def client(number: int) -> None:
        while time.perf_counter() < begin + SETTLED_S + seconds:
            await tally.one(session, KEYS[number % len(KEYS)])

    await asyncio.gather(*(client(number) for number in range(2 * ROWS)))
    inside = [at for at in tally.ok_at if begin + SETTLED_S < at <= begin + SETTLED_S + seconds]
    return len(inside) / seconds


async def with_retries(base: str, seconds: float) -> float:
    """The share of requests that the stock client brings home with three retries at 1.2 times the capacity."""
    random_ = random.Random(12)
    clients = [openai.AsyncOpenAI(base_url=base + "/v1", api_key=k, max_retries=3) for k in KEYS]

    model = (await clients[0].models.list()).data[0].id

    async def one() -> bool:
        try:
            client = random_.choice(clients)
            await client.completions.create(
                model=model, prompt="fox", max_tokens=TOKENS, extra_body={"min_tokens": TOKENS}
            )
        except openai.APIStatusError:
            return False
        return True

    tasks, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(random_.expovariate(1.2 * NOMINAL))
    home = await asyncio.gather(*tasks)
    return round(sum(home) / len(home), 4)


async def run(
    base: str, supervisor: Any, seconds: float, deadline_s: float | None, at: list[float]
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base, connector=connector) as session:
        levels, memory = [], []
        async with aiohttp.ClientSession(base, headers=headers) as asking:
            await at_rest(asking)
            capacity = await measured_capacity(session, min(seconds, CAPACITY_S))
            await at_rest(asking)
            for level in at:
                levels.append(
                    await at_level(session, level, seconds, supervisor, deadline_s, capacity)
                )
                await at_rest(asking)
                memory.append(round(resident_mib(supervisor), 1))
            retried = await with_retries(base, min(seconds, RETRIED_S))
            rest = await at_rest(asking)
    by_level = {found["level"]: found["goodput_req_s"] for found in levels}
    return {
        "nominal_req_s": NOMINAL, "capacity_req_s": round(capacity, 2),
        "load_average": [round(x, 1) for x in os.getloadavg()], "seconds": seconds, "levels": levels,
        "goodput_20x_over_1x": round(by_level[max(at)] / by_level[1], 3),
        "retried_home": retried, "rss_mib_after_level": memory,
        "leaked_blocks": rest["total_blocks"] - rest["free_blocks"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="of each level")
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="1 among them")
    parser.add_argument("--deadline-s", type=float, help="the time of each request")
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *null_model(Path(folder), step_s=STEP_S),
            *("--max-running", str(ROWS), "--api-keys", ",".join(KEYS)),
        ]
        if given.deadline_s is None:
            arguments += ["--policy", "fair", "--max-queued-requests", str(QUEUE)]
        with server(*arguments) as (base, supervisor):
            report = asyncio.run(
                run(base, supervisor, given.seconds, given.deadline_s, given.levels)
            )
    print(json.dumps(report, indent=1))
    if given.write:
        name = "overload.json"
        if given.deadline_s is not None:
            name = f"overload_deadline_{given.deadline_s:g}.json"
        Path(__file__).with_name(name).write_text(json.dumps(report, indent=1) + "\n")
    lost = sum(found["ledger"].get(k, 0) for found in report["levels"] for k in ("lost", "failed"))
    refused = sum(found["ledger"].get("refused", 0) for found in report["levels"])
    told = sum(found["refused_with_retry_after"] for found in report["levels"])
    whole = not lost and told == refused and not report["leaked_blocks"]
    return 0 if whole and report["goodput_20x_over_1x"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
