"""`bench sweep`: one load after another at growing concurrency or request rate; a row per load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base.errors import ConfigError
from headrace.bench.serve import GOODPUT, LoadSpec, run_load

LEAST_REQUESTS = 32
REQUESTS_PER_USER = 4
MAX_LIMIT_MS = 1e9
SECONDS_PER_RATE = 30
"""Length of an open-loop load whose number of requests is not stated."""
COLUMNS = (
    *("load", "ok", "refused", "failed", "lost", "req/s", "output tok/s"),
    *("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "E2E p99 ms"),
)


def parse_points(text: str | None, *, flag: str, greatest: float, whole: bool) -> list[float]:
    """Comma-separated loads, each above 0, none for None; ConfigError names the flag and the wrong
    one."""
    points: list[float] = []
    for part in [] if text is None else text.split(","):
        try:
            point = float(int(part) if whole else float(part))
        except ValueError:
            point = 0.0
        if not 0 < point <= greatest:
            kind = "whole numbers" if whole else "numbers"
            raise ConfigError(
                f"{flag}: {part!r:.80} is out of range (allowed: {kind} above 0 to {greatest:g})",
                field=flag,
            )
        points.append(point)
    return points


def loads_of(
    base: LoadSpec,
    *,
    concurrency: Sequence[float],
    rates: Sequence[float],
    num_requests: int | None,
) -> list[LoadSpec]:
    """The loads of a sweep: closed loops for each concurrency, then open loops for each rate. Each
    has a seed of its own, so that no load finds the prompts of another in the prefix cache."""
    loads = [
        msgspec.structs.replace(
            base,
            concurrency=int(users),
            rate=None,
            num_requests=num_requests or max(LEAST_REQUESTS, REQUESTS_PER_USER * int(users)),
        )
        for users in concurrency
    ]
    loads += [
        msgspec.structs.replace(
            base,
            rate=rate,
            num_requests=num_requests or max(LEAST_REQUESTS, round(rate * SECONDS_PER_RATE)),
        )
        for rate in rates
    ]
    return [msgspec.structs.replace(load, seed=base.seed + at) for at, load in enumerate(loads)]


def sweep(
    loads: Sequence[LoadSpec], run: Callable[[LoadSpec], dict[str, Any]] = run_load
) -> list[dict[str, Any]]:
    """Runs the loads in order; the report of each with what made it."""
    return [
        {
            "concurrency": None if load.rate is not None else load.concurrency,
            "rate": load.rate,
            "num_requests": load.num_requests,
            **run(load),
        }
        for load in loads
    ]


def parse_limits(words: Sequence[str] | None) -> dict[str, float]:
    """Limits such as ttft:500, in milliseconds; ConfigError names the wrong one."""
    limits: dict[str, float] = {}
    for word in words or ():
        name, _, text = word.partition(":")
        try:
            most = float(text)
        except ValueError:
            most = 0.0
        if name not in GOODPUT or not 0 < most <= MAX_LIMIT_MS:
            raise ConfigError(
                f"--goodput: {word!r:.80}; a limit is NAME:MILLISECONDS, of {', '.join(GOODPUT)}, above 0 to "
                f"{MAX_LIMIT_MS:g}",
                field="--goodput",
            )
        limits[name] = most
    return limits


def show_sweep(points: Sequence[dict[str, Any]], *, title: str) -> None:
    """Prints one row per load."""
    has_limits = any("goodput_req_s" in point for point in points)
    table = Table(*COLUMNS, *(["goodput req/s"] if has_limits else []), title=title)
    for point in points:
        goodput = [f"{point['goodput_req_s']:.2f}"] if "goodput_req_s" in point else []
        table.add_row(*_row(point), *goodput)
    Console().print(table)


def _row(point: dict[str, Any]) -> list[str]:
    load = f"{point['rate']:g}/s" if point["rate"] is not None else f"{point['concurrency']} users"
    ledger = point["ledger"]
    counts = [str(ledger[kind]) for kind in ("ok", "refused", "failed", "lost")]
    rates = [f"{point['req_s']:.2f}", f"{point['output_tok_s']:,.1f}"]
    times = [
        f"{point[series][quantile]:,.1f}" if point[series] else "-"
        for series, quantile in (
            *(("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99")),
            ("e2e_ms", "p99"),
        )
    ]
    return [load, *counts, *rates, *times]
