"""`bench sweep`: which loads it runs, and what its table holds."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.serve import LoadClient, LoadSpec, RequestOutcome
from headrace.bench.sweep import COLUMNS, _row, loads_of, parse_limits, parse_points, sweep

BASE = LoadSpec(base_url="http://localhost:1")
SPREAD = {"p50": 1.0, "p99": 2.0}


def report(load: LoadSpec) -> dict[str, Any]:
    return {
        "ledger": {"sent": load.num_requests, "ok": 3, "refused": 1, "failed": 0, "lost": 0},
        **{"req_s": 1.5, "output_tok_s": 1234.5, "ttft_ms": SPREAD, "itl_ms": {}, "e2e_ms": SPREAD},
    }


def test_points_are_read_in_order() -> None:
    assert parse_points("1,4,16", flag="--concurrency", greatest=64, whole=True) == [1, 4, 16]
    assert parse_points("0.5,2", flag="--rates", greatest=64, whole=False) == [0.5, 2]
    assert parse_points(None, flag="--rates", greatest=64, whole=False) == []


@pytest.mark.parametrize("text", ["", "0", "1,,2", "65", "1.5", "-1", "many"])
def test_a_wrong_point_is_refused_by_flag_value_and_limit(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--concurrency: .*allowed: whole numbers above 0 to 64"):
        parse_points(text, flag="--concurrency", greatest=64, whole=True)


def test_closed_loops_come_before_open_ones_each_with_prompts_of_its_own() -> None:
    loads = loads_of(BASE, concurrency=[1, 100], rates=[0.5, 10], num_requests=None)
    assert [load.num_requests for load in loads] == [32, 400, 32, 300]
    assert [load.rate for load in loads] == [None, None, 0.5, 10]
    assert len({load.seed for load in loads}) == 4
    fixed = loads_of(BASE, concurrency=[1], rates=[1], num_requests=7)
    assert [load.num_requests for load in fixed] == [7, 7]


def test_each_load_is_a_row_and_an_object() -> None:
    loads = loads_of(BASE, concurrency=[4], rates=[2.5], num_requests=8)
    points = sweep(loads, run=report)
    assert [(p["concurrency"], p["rate"]) for p in points] == [(4, None), (None, 2.5)]
    assert all(len(_row(point)) == len(COLUMNS) for point in points)
    assert _row(points[1])[:7] == ["2.5/s", "3", "1", "0", "0", "1.50", "1,234.5"]
    assert _row(points[0])[9] == "-"


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    """KVT-10: requests per second within all limits, of those that ended well."""
    limits = parse_limits(["ttft:500", "tpot:50"])
    assert limits == {"ttft": 500.0, "tpot": 50.0} and parse_limits(None) == {}
    client = LoadClient(LoadSpec(base_url="http://localhost:1", limits=limits))
    times = ((0.5, 1.0, 11), (0.51, 1.0, 11), (0.1, 0.5, 12), (0.1, 0.71, 11), (0.2, 0.2, 1))
    client.outcomes = [
        RequestOutcome("ok", first_s=first_s, total_s=total_s, num_output=num_output)
        for first_s, total_s, num_output in times
    ] + [RequestOutcome("failed")]
    report = client.report(2.0)
    assert report["within_limits"] == 3 and report["goodput_req_s"] == 1.5
    unlimited = LoadClient(LoadSpec(base_url="http://localhost:1"))
    assert "goodput_req_s" not in unlimited.report(2.0)


@pytest.mark.parametrize("word", ["ttft", "ttft:0", "itl:5", "tpot:x", "ttft:nan", ":5"])
def test_a_wrong_limit_is_refused_with_what_one_is(word: str) -> None:
    with pytest.raises(ConfigError, match=r"--goodput: .*ttft, tpot, e2el"):
        parse_limits([word])
