"""docs/grafana.json: a Grafana dashboard over our own series, generated, so that it cannot name one
we do not have."""

from __future__ import annotations

import json
from typing import Any

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
QUANTILES = (0.5, 0.9, 0.99)


def _rate(series: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({series}[$__rate_interval]))"


def _quantiles(series: str) -> dict[str, str]:
    return {
        f"p{100 * q:g}": f"histogram_quantile({q}, sum by (le) (rate({series}_bucket[$__rate_interval])))"
        for q in QUANTILES
    }


PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Tokens per second",
        "short",
        {
            "prompt": _rate("headrace_prompt_tokens_total"),
            "generated": _rate("headrace_generation_tokens_total"),
        },
    ),
    (
        "Running and waiting",
        "short",
        {
            "running": "sum(headrace_engine_running)",
            "waiting": "sum(headrace_engine_waiting)",
        },
    ),
    (
        "KV blocks held",
        "percentunit",
        {"held": "sum(headrace_engine_held_blocks) / sum(headrace_engine_total_blocks)"},
    ),
    ("Time to first token", "s", _quantiles("headrace_time_to_first_token_seconds")),
    ("Time between tokens", "s", _quantiles("headrace_inter_token_latency_seconds")),
    ("Whole request", "s", _quantiles("headrace_e2e_request_latency_seconds")),
    ("Waiting before the first step", "s", _quantiles("headrace_request_queue_time_seconds")),
    (
        "Prefix cache hits",
        "percentunit",
        {
            "hits": _rate("headrace_engine_prefix_hit_tokens").replace("rate(", "deriv(")
            + " / "
            + _rate("headrace_engine_prefix_query_tokens").replace("rate(", "deriv(")
        },
    ),
    (
        "Ends by reason",
        "short",
        {"{{finished_reason}}": _rate("headrace_request_success_total", "finished_reason")},
    ),
    (
        "Answers by status",
        "short",
        {"{{status}}": _rate("headrace_http_requests_total", "status")},
    ),
    (
        "Refused for want of capacity",
        "short",
        {"{{reason}}": _rate("headrace_rejections_total", "reason")},
    ),
    (
        "Preemptions",
        "short",
        {"preemptions": "deriv(headrace_engine_preemptions[$__rate_interval])"},
    ),
)
"""Title, unit, and legend -> query."""


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    panels = [_panel(i, *panel) for i, panel in enumerate(PANELS)]
    document = {
        "title": "headrace",
        "uid": "headrace",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
            ]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _panel(index: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": source, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(queries.items())
        ],
    }
