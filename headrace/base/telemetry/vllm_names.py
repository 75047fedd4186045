"""Our series under the names that dashboards for vLLM ask for, when `--metrics-compat
vllm` wants them too.

A text to a text: each line of the exposition that the table names is given a second time, with a
`model_name` label; gauges and counters that only the engine cores know are made of their figures.
What has no equal here is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

SERIES: Mapping[str, tuple[str, ...]] = {
    "headrace_prompt_tokens": ("vllm:prompt_tokens",),
    "headrace_generation_tokens": ("vllm:generation_tokens",),
    "headrace_cached_prompt_tokens": ("vllm:prompt_tokens_cached",),
    "headrace_request_success": ("vllm:request_success",),
    "headrace_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "headrace_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    "headrace_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "headrace_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "headrace_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "headrace_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "headrace_request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "headrace_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "headrace_request_generation_tokens": ("vllm:request_generation_tokens",),
    "headrace_rejections": ("vllm:admission_rejections",),
    "headrace_request_n": ("vllm:request_params_n",),
    "headrace_request_preemptions": ("vllm:request_num_preemptions",),
    "headrace_request_max_tokens": ("vllm:request_params_max_tokens",),
    "headrace_nonfinite_requests": ("vllm:corrupted_requests",),
    "headrace_websockets_open": ("vllm:websocket_connections_active",),
    "headrace_websockets": ("vllm:websocket_connections",),
    "headrace_websocket_seconds": ("vllm:websocket_connection_duration_seconds",),
}
"""Ours -> vLLM's (old names of a series too), without the suffixes of counters and histograms."""

FIGURES: Mapping[str, tuple[str, str]] = {
    "running": ("vllm:num_requests_running", "gauge"),
    "waiting": ("vllm:num_requests_waiting", "gauge"),
    "preemptions": ("vllm:num_preemptions_total", "counter"),
    "drafts": ("vllm:spec_decode_num_drafts_total", "counter"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", "counter"),
    "accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens_total", "counter"),
    "prefix_query_tokens": ("vllm:prefix_cache_queries_total", "counter"),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "counter"),
    "media_queries": ("vllm:mm_cache_queries_total", "counter"),
    "media_hits": ("vllm:mm_cache_hits_total", "counter"),
    "estimated_flops": ("vllm:estimated_flops_per_gpu_total", "counter"),
    "estimated_read_bytes": ("vllm:estimated_read_bytes_per_gpu_total", "counter"),
    "estimated_write_bytes": ("vllm:estimated_write_bytes_per_gpu_total", "counter"),
    "asleep": ("vllm:engine_sleep_state", "gauge"),
}
"""Figure of a core's status -> vLLM's series and its type."""

OF_SEVERAL_FIGURES = (
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:num_requests_waiting_by_reason",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:lora_requests_info",
)
ABSENT: Mapping[str, str] = {
    "vllm:external_prefix_cache_queries, _hits": "there is no prefix cache outside the engine",
    "vllm:engine_sleep_state by state": "the series is 1 while asleep; the ledger tells the level",
}
"""vLLM's series that have no equal here, and why: a series that never moves would say that
something is counted."""

_LINE = re.compile(r"^(headrace_\w+?)(_total|_bucket|_sum|_count)?(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TYPE = re.compile(r"^# TYPE (headrace_\w+?)(_total)? (\w+)$")


def vllm_text(ours: str, engines: Sequence[Mapping[str, object]], model: str) -> str:
    """The lines to add to the exposition `ours`."""
    label = f'model_name="{escaped(model)}"'
    # What the front counts belongs to no core; where there is one only, it is that one's.
    front = f'engine="{0 if len(engines) == 1 else "all"}",{label}'
    lines = [renamed for line in ours.splitlines() for renamed in _renamed(line, front)]
    lines += _http_requests(ours)
    lines.append("# TYPE vllm:iteration_tokens_total histogram")
    for index, engine in enumerate(engines):
        lines += _step_tokens(engine, f'engine="{index}",{label}')
    for figure, (name, kind) in FIGURES.items():
        lines.append(f"# TYPE {name} {kind}")
        for index, engine in enumerate(engines):
            value = engine.get(figure)
            if isinstance(value, int | float):
                lines.append(f'{name}{{engine="{index}",{label}}} {float(value)}')
    for name in OF_SEVERAL_FIGURES:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# TYPE {name} {kind}")
        for index, engine in enumerate(engines):
            lines += _of_several(name, engine, f'engine="{index}",{label}')
    return "\n".join(lines) + "\n"


def _of_several(name: str, engine: Mapping[str, object], label: str) -> list[str]:
    """The lines of a series that is no single figure."""
    held, total = engine.get("held_blocks"), engine.get("total_blocks")
    waiting = engine.get("waiting_by_reason")
    if name == "vllm:num_requests_waiting_by_reason":
        counts = waiting.items() if isinstance(waiting, Mapping) else ()
        return [f'{name}{{{label},reason="{escaped(str(k))}"}} {float(n)}' for k, n in counts]
    if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
        accepted = engine.get("accepted_draft_tokens_by_position")
        places = accepted if isinstance(accepted, list) else []
        return [f'{name}{{{label},position="{i}"}} {float(n)}' for i, n in enumerate(places)]
    if name == "vllm:lora_requests_info":
        return _lora_info(name, engine.get("adapter_requests"), label)
    if not (isinstance(total, int) and isinstance(held, int) and total):
        return []
    if name == "vllm:kv_cache_usage_perc":
        return [f"{name}{{{label}}} {held / total}"]
    size = engine.get("block_tokens")
    return [f'{name}{{{label},block_size="{size}",num_gpu_blocks="{total}"}} 1.0']


def _lora_info(name: str, adapters: object, label: str) -> list[str]:
    """One line of a server with adapters: their names by state, and how many fit."""
    if not isinstance(adapters, Mapping):
        return []
    states = ("running", "waiting")
    names = [f'{one}_lora_adapters="{escaped(",".join(adapters[one]))}"' for one in states]
    return [f'{name}{{{label},max_lora="{adapters["slots"]}",{",".join(names)}}} 1.0']


def _step_tokens(engine: Mapping[str, object], label: str) -> list[str]:
    """The histogram of tokens in a step."""
    counts, tokens = engine.get("step_tokens"), engine.get("tokens")
    if not isinstance(counts, Mapping):
        return []
    name, lines, total = "vllm:iteration_tokens_total", [], 0
    for bound, count in counts.items():
        total += int(count)
        least = "+Inf" if bound == "inf" else str(float(bound))
        lines.append(f'{name}_bucket{{{label},le="{least}"}} {float(total)}')
    return [*lines, f"{name}_sum{{{label}}} {tokens}", f"{name}_count{{{label}}} {float(total)}"]


def _http_requests(ours: str) -> list[str]:
    """Requests by route, method and class of status, under the name that instrumented web servers
    share."""
    counts: Counter[tuple[str, ...]] = Counter()
    for line in ours.splitlines():
        match = _LINE.match(line)
        if match is not None and match[1] == "headrace_http_requests" and match[3]:
            labels = dict(_LABEL.findall(match[3]))
            status = labels["status"]
            kind = f"{status[0]}xx" if status.isdecimal() else status
            counts[labels["route"], labels["method"], kind] += int(float(match[4]))
    lines = [
        f'http_requests_total{{handler="{route}",method="{method}",status="{kind}"}} {float(count)}'
        for (route, method, kind), count in counts.items()
    ]
    return ["# TYPE http_requests_total counter", *lines]


def _renamed(line: str, label: str) -> list[str]:
    typed = _TYPE.match(line)
    if typed is not None:
        return [f"# TYPE {name}{typed[2] or ''} {typed[3]}" for name in SERIES.get(typed[1], ())]
    match = _LINE.match(line)
    if match is None:
        return []
    ours, suffix, labels, value = match.groups()
    both = f"{label},{labels}" if labels else label
    return [f"{name}{suffix or ''}{{{both}}} {value}" for name in SERIES.get(ours, ())]


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
