"""The dashboard asks only for series that exist."""

from __future__ import annotations

import json
import re

from headrace.base.telemetry.dashboard import dashboard
from headrace.base.telemetry.metrics import TABLE
from headrace.base.telemetry.vllm_names import SERIES, vllm_text

SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def known() -> set[str]:
    return {series.name + suffix for series in TABLE for suffix in SUFFIXES}


def test_every_query_names_a_series_of_the_table() -> None:
    panels = json.loads(dashboard())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            for name in re.findall(r"headrace_\w+", target["expr"]):
                assert name in known() or name.startswith("headrace_engine_"), name
            assert target["expr"].count("(") == target["expr"].count(")")


def test_every_renamed_series_is_in_the_table() -> None:
    bare = {series.name.removesuffix("_total") for series in TABLE}
    assert set(SERIES) <= bare


def test_labels_of_a_renamed_line_are_kept_and_the_model_is_escaped() -> None:
    ours = 'headrace_request_success_total{finished_reason="stop"} 3.0\nheadrace_slow_readers_total 1.0'
    found = vllm_text(ours, [{"running": 2, "held_blocks": 1, "total_blocks": 4}], 'a"b')
    assert 'vllm:request_success_total{model_name="a\\"b",finished_reason="stop"} 3.0' in found
    assert "slow_readers" not in found
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="a\\"b"} 0.25' in found
