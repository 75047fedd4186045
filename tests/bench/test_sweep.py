"""`bench sweep`: which loads it runs, and what its table holds."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.serve import LoadSpec
from headrace.bench.sweep import COLUMNS, _row, loads_of, parse_points, sweep

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
