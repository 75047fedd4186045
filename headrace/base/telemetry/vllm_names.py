"""Our series under the names that dashboards for vLLM ask for (OBS-03), when `--metrics-names vllm` wants them too.

A text to a text: each line of the exposition that the table names is given a second time, with a `model_name` label;
gauges and counters that only the engine cores know are made of their figures. What has no equal here is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SERIES: Mapping[str, str] = {
    "headrace_prompt_tokens": "vllm:prompt_tokens",
    "headrace_generation_tokens": "vllm:generation_tokens",
    "headrace_cached_prompt_tokens": "vllm:prompt_tokens_cached",
    "headrace_request_success": "vllm:request_success",
    "headrace_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "headrace_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "headrace_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "headrace_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "headrace_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "headrace_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "headrace_request_inference_time_seconds": "vllm:request_inference_time_seconds",
    "headrace_request_prompt_tokens": "vllm:request_prompt_tokens",
    "headrace_request_generation_tokens": "vllm:request_generation_tokens",
}
"""Ours -> vLLM's, without the suffixes of counters and histograms."""

FIGURES: Mapping[str, tuple[str, str]] = {
    "running": ("vllm:num_requests_running", "gauge"),
    "waiting": ("vllm:num_requests_waiting", "gauge"),
    "preemptions": ("vllm:num_preemptions_total", "counter"),
    "prefix_query_tokens": ("vllm:prefix_cache_queries_total", "counter"),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "counter"),
}
"""Figure of a core's status -> vLLM's series and its type."""

_LINE = re.compile(r"^(headrace_\w+?)(_total|_bucket|_sum|_count)?(?:\{(.*)\})? (\S+)$")
_TYPE = re.compile(r"^# TYPE (headrace_\w+?)(_total)? (\w+)$")


def vllm_text(ours: str, engines: Sequence[Mapping[str, object]], model: str) -> str:
    """The lines to add to the exposition `ours`."""
    label = f'model_name="{_escaped(model)}"'
    lines = [line for line in (_renamed(line, label) for line in ours.splitlines()) if line]
    for figure, (name, kind) in FIGURES.items():
        lines.append(f"# TYPE {name} {kind}")
        for index, engine in enumerate(engines):
            value = engine.get(figure)
            if isinstance(value, int | float):
                lines.append(f'{name}{{engine="{index}",{label}}} {float(value)}')
    lines.append("# TYPE vllm:kv_cache_usage_perc gauge")
    for index, engine in enumerate(engines):
        held, total = engine.get("held_blocks"), engine.get("total_blocks")
        if isinstance(held, int) and isinstance(total, int) and total:
            lines.append(f'vllm:kv_cache_usage_perc{{engine="{index}",{label}}} {held / total}')
    return "\n".join(lines) + "\n"


def _renamed(line: str, label: str) -> str | None:
    typed = _TYPE.match(line)
    if typed is not None and typed[1] in SERIES:
        return f"# TYPE {SERIES[typed[1]]}{typed[2] or ''} {typed[3]}"
    found = _LINE.match(line)
    if found is None or found[1] not in SERIES:
        return None
    name, suffix, labels, value = found.groups()
    both = f"{label},{labels}" if labels else label
    return f"{SERIES[name]}{suffix or ''}{{{both}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
