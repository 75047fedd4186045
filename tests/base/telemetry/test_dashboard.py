"""The dashboard asks only for series that exist."""

from __future__ import annotations

import json
import re

from headrace.base.telemetry.dashboard import dashboard
from headrace.base.telemetry.metrics import TABLE, metrics_page
from headrace.base.telemetry.vllm_names import (
    ABSENT,
    FIGURES,
    OF_SEVERAL_FIGURES,
    SERIES,
    vllm_text,
)

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
    label = 'engine="0",model_name="a\\"b"'
    assert f'vllm:request_success_total{{{label},finished_reason="stop"}} 3.0' in found
    assert "slow_readers" not in found
    several = vllm_text(ours, [{}, {}], "m")
    assert 'vllm:request_success_total{engine="all",model_name="m"' in several
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="a\\"b"} 0.25' in found


def test_adapters_and_inputs_that_were_there_are_told() -> None:
    """OBS-03: of a core without adapters there is no line."""
    using = {"slots": 4, "running": ["a", 'b"c'], "waiting": []}
    engines = [{"adapter_requests": using, "media_queries": 5, "media_hits": 2}, {}]
    found = vllm_text("", engines, "m")
    names = 'max_lora="4",running_lora_adapters="a,b\\"c",waiting_lora_adapters=""'
    assert f'vllm:lora_requests_info{{engine="0",model_name="m",{names}}} 1.0' in found
    assert 'vllm:lora_requests_info{engine="1"' not in found
    assert 'vllm:mm_cache_queries_total{engine="0",model_name="m"} 5.0' in found
    assert 'vllm:mm_cache_hits_total{engine="0",model_name="m"} 2.0' in found


def test_a_step_is_counted_in_its_bucket_and_requests_by_class_of_status() -> None:
    ours = "\n".join(
        f'headrace_http_requests_total{{method="GET",route="/load",status="{status}"}} {count}'
        for status, count in (("200", 3.0), ("201", 1.0), ("503", 2.0), ("other", 1.0))
    )
    found = vllm_text(ours, [{"tokens": 70, "step_tokens": {"1": 2, "64": 1, "inf": 0}}], "m")
    head = 'engine="0",model_name="m"'
    for least, count in (("1.0", 2.0), ("64.0", 3.0), ("+Inf", 3.0)):
        assert f'vllm:iteration_tokens_total_bucket{{{head},le="{least}"}} {count}' in found
    assert f"vllm:iteration_tokens_total_sum{{{head}}} 70" in found
    for kind, count in (("2xx", 4.0), ("5xx", 2.0), ("other", 1.0)):
        line = f'http_requests_total{{handler="/load",method="GET",status="{kind}"}} {count}'
        assert line in found.splitlines()


def test_what_has_no_equal_is_explained_and_not_told() -> None:
    """OBS-03: every series of the contract is told, or named with the reason why not."""
    told = {name for names in SERIES.values() for name in names}
    told |= {name for name, _ in FIGURES.values()} | set(OF_SEVERAL_FIGURES)
    page = metrics_page()
    for name in ABSENT:
        first = name.partition(",")[0].partition(" ")[0]
        assert first in page and (first not in told or " by " in name)
    for family in ("external_prefix_cache",):
        assert any(family in name for name in ABSENT)


def test_drafts_are_told_by_number_and_by_place() -> None:
    engine = {"drafts": 3, "draft_tokens": 9, "accepted_draft_tokens": 4}
    told = vllm_text(
        "", [{**engine, "accepted_draft_tokens_by_position": [3, 1]}], "m"
    ).splitlines()
    head = 'engine="0",model_name="m"'
    for name, value in (("drafts", 3), ("draft_tokens", 9), ("accepted_tokens", 4)):
        assert f"vllm:spec_decode_num_{name}_total{{{head}}} {float(value)}" in told
    for place, value in enumerate((3, 1)):
        series = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{series}{{{head},position="{place}"}} {float(value)}' in told
