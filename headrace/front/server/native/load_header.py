"""The load of the engine in a header of each answer, for load balancers that ask for it (ORCA: Open
Request Cost Aggregation of Envoy and the Kubernetes gateway): `endpoint-load-metrics-format: TEXT`
or `JSON` is answered with `endpoint-load-metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.base.errors import HeadraceError
from headrace.front.server.conversation.context import Services

FORMAT_HEADER = b"endpoint-load-metrics-format"
LOAD_HEADER = b"endpoint-load-metrics"
PATIENCE_S = 5.0


async def load_header(services: Services, form: bytes) -> list[tuple[bytes, bytes]]:
    """The header; none for an unknown form, and where no engine says anything in time."""
    kind = form.strip().upper()
    if kind not in (b"TEXT", b"JSON"):
        return []
    try:
        async with asyncio.timeout(PATIENCE_S):
            replies = await services.engine.call_each("status")
    except (HeadraceError, TimeoutError):
        return []
    statuses = [reply for reply in replies if isinstance(reply, Mapping)]
    if not statuses:
        return []
    figures = _figures(statuses)
    if kind == b"JSON":
        return [(LOAD_HEADER, b"JSON " + orjson.dumps({"named_metrics": figures}))]
    text = ", ".join(f"named_metrics.{name}={value:g}" for name, value in figures.items())
    return [(LOAD_HEADER, b"TEXT " + text.encode())]


def _figures(statuses: list[Mapping[str, Any]]) -> dict[str, float]:
    """The share of KV blocks in use (0 to 1) and the requests that wait and run, of all engines."""
    total = sum(status["total_blocks"] for status in statuses)
    held = sum(status["held_blocks"] for status in statuses)
    return {
        "kv_cache_usage_perc": held / total if total else 0.0,
        "num_requests_waiting": float(sum(status["waiting"] for status in statuses)),
        "num_requests_running": float(sum(status["running"] for status in statuses)),
    }
