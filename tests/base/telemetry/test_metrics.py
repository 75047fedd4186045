from __future__ import annotations

import pytest

from headrace.base.telemetry.metrics import (
    ROUTES,
    TABLE,
    MetricKind,
    Metrics,
    metrics_page,
    template_of,
)


def names_of(text: bytes) -> set[str]:
    return {line.split(" ")[0] for line in text.decode().splitlines() if not line.startswith("#")}


def test_a_value_outside_the_closed_set_counts_as_other() -> None:
    """P20/T20: the number of series stays the same however many methods, paths and statuses there are."""
    metrics = Metrics()
    for i in range(100_000):
        metrics.add(
            "headrace_http_requests_total", method=f"M{i}", route=f"/r{i}", status=str(700 + i)
        )
    text = metrics.exposition([])
    line = 'headrace_http_requests_total{method="other",route="other",status="other"}'
    assert f"{line} 100000.0" in text.decode()
    assert sum(name.startswith("headrace_http_requests_total") for name in names_of(text)) == 1


def test_a_path_with_an_id_counts_as_its_route() -> None:
    """Every route of one id, and those that stand behind it."""
    with_id = [route for route in ROUTES if "{id}" in route]
    assert "/slots/{id}" in with_id and "/v1/requests/{id}" in with_id
    for route in with_id:
        assert template_of(route.format(id="x7", item="y8")) == route
    assert template_of("/nowhere/x7") == "other"


def test_the_number_of_series_is_bounded_by_the_table() -> None:
    metrics = Metrics()
    for series in TABLE:
        if series.kind is MetricKind.HISTOGRAM:
            metrics.observe(series.name, 1.0)
        else:
            metrics.add(series.name, **dict.fromkeys(series.labels, "x"))
    first = names_of(metrics.exposition([]))
    for series in TABLE:
        if series.labels:
            metrics.add(series.name, **dict.fromkeys(series.labels, "another"))
    assert names_of(metrics.exposition([])) == first


def test_figures_of_the_cores_are_labelled_by_engine_and_only_numbers_count() -> None:
    text = Metrics().exposition([{"steps": 3, "mode": "x", "bad-name": 1}, {"steps": 4}]).decode()
    assert 'headrace_engine_steps{engine="0"} 3.0' in text
    assert 'headrace_engine_steps{engine="1"} 4.0' in text
    assert "mode" not in text and "bad-name" not in text


def test_a_series_tells_why_requests_wait() -> None:
    waiting = {"waiting_by_reason": {"rows": 2, 'adapter "x"': 1}, "waiting_by_tenant": {"ab": 3}}
    text = Metrics().exposition([{}, waiting]).decode()
    assert 'headrace_engine_waiting_by_reason{engine="1",reason="rows"} 2.0' in text
    assert r'reason="adapter \"x\""} 1.0' in text
    assert "by_tenant" not in text


def test_a_histogram_is_not_added_to() -> None:
    with pytest.raises(AssertionError, match="histogram"):
        Metrics().add("headrace_request_prompt_tokens")


def test_every_series_stands_on_the_page_once() -> None:
    page = metrics_page()
    assert all(page.count(f"| `{series.name}` |") == 1 for series in TABLE)
