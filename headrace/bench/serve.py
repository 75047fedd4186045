"""A load client for any OpenAI-compatible server: closed loop (a number of users) or open loop
(arrivals at a rate).

Every request ends in exactly one column of the ledger: sent = ok + refused + failed + lost. ok:
finished with its normal end. refused: 4xx, 429, 503. failed: an error event or a 5xx body. lost: no
terminal event, a cut connection, or silence past the deadline. Latencies are of ok requests only;
open-loop latencies count from the moment a request was due, so that a stalled server cannot hide
its queue. Goodput is of those ok requests that keep all stated limits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from headrace.base.errors import ConfigError
from headrace.base.optional import require
from headrace.bench.report import percentiles

_WORDS = (
    "the", "river", "turns", "a", "wheel", "of", "oak", "and", "stone", "while",
    "bright", "water", "runs", "below", "old", "mill", "house",
)  # fmt: skip


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. `rate` requests per second (open loop), or `concurrency` users (closed loop).

    `input_words` are random words per prompt, `output_tokens` the max_tokens asked for.
    `token_ids`: prompts are random token ids below it instead (completions only), `input_words` of
    them, more or fewer by the share `spread`. `limits`: what a request must keep to count for
    goodput, in milliseconds by the names of GOODPUT.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = "chat"
    num_requests: int = 100
    concurrency: int | None = 8
    rate: float | None = None
    input_words: int = 64
    output_tokens: int = 64
    shared_words: int = 0
    token_ids: int = 0
    spread: float = 0.0
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 600.0
    seed: int = 0
    limits: dict[str, float] = {}


class RequestOutcome(msgspec.Struct):
    """One request: its column of the ledger and its times in seconds since it was due."""

    kind: str
    status: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = []
    num_output: int = 0
    num_prompt: int = 0
    detail: str = ""

    @property
    def per_token_s(self) -> float:
        """From token to token behind the first; 0 where there is one."""
        return (self.total_s - (self.first_s or 0.0)) / max(1, self.num_output - 1)

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether its times are within these limits, in milliseconds."""
        times = {"ttft": self.first_s, "tpot": self.per_token_s, "e2el": self.total_s}
        return all(1000 * (times[name] or 0.0) <= most for name, most in limits.items())


GOODPUT = ("ttft", "tpot", "e2el")
"""Time to the first token, for each token behind it, and to the end."""


def make_prompt(load: LoadSpec, number: int) -> str:
    """The text of request `number`: a shared beginning, then random words of its own."""
    shared, own = random.Random(load.seed), random.Random(f"{load.seed}/{number}")
    words = [shared.choice(_WORDS) for _ in range(load.shared_words)]
    return " ".join(words + [own.choice(_WORDS) for _ in range(load.input_words)])


def make_ids(load: LoadSpec, number: int) -> list[int]:
    """The prompt of request `number` as random token ids."""
    own = random.Random(f"{load.seed}/{number}")
    low, high = (round(load.input_words * (1 + sign * load.spread)) for sign in (-1, 1))
    return [own.randrange(load.token_ids) for _ in range(max(1, own.randint(low, high)))]


def make_body(load: LoadSpec, model: str, number: int) -> tuple[str, dict[str, Any]]:
    """The path and JSON body of request `number`."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": load.output_tokens,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": number,
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.token_ids:
        return "/v1/completions", {**body, "prompt": make_ids(load, number)}
    prompt = make_prompt(load, number)
    if load.endpoint == "completions":
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}


async def events(content: Any) -> AsyncIterator[bytes]:
    """The data of each server-sent event of a response body. Whatever has arrived is cut at once: a
    wait for each line would make the client the slowest part of the load."""
    held = b""
    async for data in content.iter_any():
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].rstrip(b"\r")


Body = Callable[[LoadSpec, str, int], tuple[str, dict[str, Any]]]
"""Of a load and a model: the path and JSON body of the request of a number."""


class LoadClient:
    """Sends one `LoadSpec` and keeps the ledger."""

    def __init__(self, load: LoadSpec, body: Body = make_body) -> None:
        if load.rate is None and load.concurrency is None:
            raise ConfigError("bench serve needs --concurrency or --rate")
        self._load, self._body = load, body
        self._http = require("aiohttp", extra="bench", purpose="bench serve")
        self.outcomes: list[RequestOutcome] = []

    async def run(self) -> dict[str, Any]:
        """Sends everything; returns the report."""
        load = self._load
        headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
        connector = self._http.TCPConnector(limit=0)
        timeout = self._http.ClientTimeout(total=None, sock_connect=30)
        async with self._http.ClientSession(
            load.base_url,
            headers=headers,
            connector=connector,
            timeout=timeout,
            read_bufsize=1 << 20,
        ) as session:
            model = load.model or await self._first_model(session)
            start = time.perf_counter()
            if load.rate is not None:
                await self._open_loop(session, model, start)
            else:
                await self._closed_loop(session, model)
            return self.report(time.perf_counter() - start)

    async def _first_model(self, session: Any) -> str:
        try:
            async with session.get("/v1/models") as response:
                document = await response.json(content_type=None)
        except self._http.ClientConnectionError as error:
            raise ConfigError(f"--url: no answer from {self._load.base_url}: {error}") from None
        except ValueError:
            document = None
        listed = document.get("data") if isinstance(document, dict) else None
        if response.status != 200 or not listed:
            raise ConfigError(
                f"{self._load.base_url}/v1/models answered {response.status}; give --model"
            )
        return str(listed[0]["id"])

    async def _closed_loop(self, session: Any, model: str) -> None:
        numbers = iter(range(self._load.num_requests))

        async def user() -> None:
            for number in numbers:
                await self._one(session, model, number, time.perf_counter())

        await asyncio.gather(*(user() for _ in range(self._load.concurrency or 1)))

    async def _open_loop(self, session: Any, model: str, start: float) -> None:
        gaps = random.Random(self._load.seed)
        due, tasks = start, []
        for number in range(self._load.num_requests):
            due += gaps.expovariate(self._load.rate or 1.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(session, model, number, due)))
        await asyncio.gather(*tasks)

    async def _one(self, session: Any, model: str, number: int, due: float) -> None:
        outcome = RequestOutcome("lost", gaps_s=[])
        try:
            async with asyncio.timeout(self._load.timeout_s):
                await self._exchange(session, model, number, due, outcome)
        except TimeoutError:
            outcome.detail = f"silence past {self._load.timeout_s:g} s"
        except (self._http.ClientError, OSError) as error:
            outcome.detail = f"{type(error).__name__}: {error}"
        outcome.total_s = time.perf_counter() - due
        self.outcomes.append(outcome)

    async def _exchange(
        self, session: Any, model: str, number: int, due: float, outcome: RequestOutcome
    ) -> None:
        path, body = self._body(self._load, model, number)
        async with session.post(path, json=body) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.kind = (
                    "refused" if response.status < 500 or response.status == 503 else "failed"
                )
                outcome.detail = (await response.text())[:200]
                return
            await self._read_stream(response.content, due, outcome)

    async def _read_stream(self, content: Any, due: float, outcome: RequestOutcome) -> None:
        last, finished = due, False
        async for data in events(content):
            if data == b"[DONE]":
                outcome.kind = "ok" if finished and outcome.kind != "failed" else outcome.kind
                return
            chunk = orjson.loads(data)
            if chunk.get("error"):
                outcome.kind, outcome.detail = "failed", str(chunk["error"])[:200]
                continue
            if chunk.get("usage"):
                outcome.num_output = chunk["usage"]["completion_tokens"]
                outcome.num_prompt = chunk["usage"]["prompt_tokens"]
            for choice in chunk.get("choices", ()):
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    now = time.perf_counter()
                    if outcome.first_s is None:
                        outcome.first_s = now - due
                    else:
                        outcome.gaps_s.append(now - last)
                    last = now
                finished |= choice.get("finish_reason") is not None

    def report(self, wall_s: float) -> dict[str, Any]:
        """The ledger, rates and latencies."""
        load, ok = self._load, [o for o in self.outcomes if o.kind == "ok"]
        ledger = {
            kind: sum(o.kind == kind for o in self.outcomes)
            for kind in ("ok", "refused", "failed", "lost")
        }
        bad = [o for o in self.outcomes if o.kind != "ok"]
        good = sum(o.keeps(load.limits) for o in ok)
        goodput = {"goodput_req_s": good / wall_s, "within_limits": good} if load.limits else {}
        return {
            "ledger": {"sent": len(self.outcomes), **ledger},
            "wall_s": wall_s,
            "req_s": len(ok) / wall_s,
            **goodput,
            "output_tok_s": sum(o.num_output for o in ok) / wall_s,
            "total_tok_s": sum(o.num_output + o.num_prompt for o in ok) / wall_s,
            "ttft_ms": percentiles([o.first_s for o in ok if o.first_s is not None], scale=1000),
            "itl_ms": percentiles([g for o in ok for g in o.gaps_s], scale=1000),
            "e2e_ms": percentiles([o.total_s for o in ok], scale=1000),
            "first_problem": bad[0].detail if bad else "",
        }

    def series(self) -> dict[str, Sequence[float]]:
        """TTFT, ITL and end-to-end samples in seconds, for the plot."""
        ok = [o for o in self.outcomes if o.kind == "ok"]
        return {
            "time to first token": [o.first_s for o in ok if o.first_s is not None],
            "between tokens": [g for o in ok for g in o.gaps_s],
            "end to end": [o.total_s for o in ok],
        }


def run_load(load: LoadSpec, *, plot: Path | None = None, body: Body = make_body) -> dict[str, Any]:
    """Runs a load from synchronous code; writes the plot if asked."""
    import uvloop

    client = LoadClient(load, body)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(client.run())
    if plot is not None:
        from headrace.bench.report import plot_latencies

        plot_latencies(plot, client.series())
    return report
