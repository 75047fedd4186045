"""Every metric series of headrace, in one table, and the objects that count them.

The table is the single source: the Prometheus exposition and docs/METRICS.md (`metrics_page`) come
from it. Label values come from closed sets that stand in the table; a value outside its set is
counted as "other", so that no client can grow the number of series. Each process counts for
itself; with several API processes prometheus_client's multiprocess files merge them (the supervisor
points PROMETHEUS_MULTIPROC_DIR at the runtime folder).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from headrace.base import env
from headrace.base.telemetry.engine_histograms import FURTHER, further_text
from headrace.base.telemetry.grpc_names import GRPC_CODES, GRPC_METHODS
from headrace.base.telemetry.vllm_names import ABSENT, FIGURES, SERIES, escaped

OTHER = "other"
disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped library


class MetricKind(Enum):
    """What a series does over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric. `labels` maps each label to the closed set of its values."""

    name: str
    kind: MetricKind
    doc: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LONG_SECONDS = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
STATUSES = (
    *("200", "400", "401", "403", "404", "405", "408", "409", "413", "415"),
    *("429", "431", "499", "500", "501", "503", "504", "507"),
)
ROUTES = (
    *("/v1/models", "/v1/models/{id}", "/v1/completions", "/v1/chat/completions"),
    *("/v1/chat/completions/batch", "/v1/embeddings", "/v2/embed", "/v2/chat", "/pooling"),
    *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/generative_scoring", "/tokenize", "/detokenize", "/health", "/health/live"),
    *("/health/ready", "/health/startup", "/health/generate", "/", "/ui/style.css", "/ui/app.js"),
    *("/ui/api.js", "/ui/chat.js", "/ui/dom.js", "/ui/engine.js", "/ui/images.js"),
    *("/ui/markdown.js", "/ui/microphone.js", "/ui/icon.svg", "/ping", "/version", "/metrics"),
    *("/load", "/v1/requests", "/props", "/apply-template", "/infill", "/slots", "/slots/{id}"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/show"),
    *("/api/ps", "/api/version", "/api/create", "/api/copy", "/api/delete", "/api/pull"),
    *("/api/push", "/api/blobs/{id}", "/v1/chat/completions/{id}"),
    *("/v1/chat/completions/{id}/messages", "/v1/tokenize", "/v1/detokenize"),
    *("/v1/requests/{id}", "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    *("/server_info", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/start_profile", "/stop_profile", "/abort_requests", "/inference/v1/abort_requests"),
    *("/collective_rpc", "/get_world_size", "/is_scaling_elastic_ep", "/kv_event_sources"),
    *("/release_kv_cache", "/release_kv_cache_memory", "/scale_elastic_ep", "/models/load"),
    *("/models/unload", "/v1/admin/load_model", "/v1/admin/unload_model", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/init_weight_transfer_engine", "/start_weight_update"),
    *("/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info"),
    *("/weight_checker", "/weights_checker", "/update_weights_from_disk"),
    *("/update_weights_from_tensor", "/get_weights_by_name", "/init_weights_update_group"),
    *("/destroy_weights_update_group", "/get_weight_version", "/update_weights_from_distributed"),
    *("/update_weights_from_ipc", "/fault_tolerance/apply", "/fault_tolerance/status"),
    *("/v1/lora_adapters", "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/batches", "/v1/batches/{id}"),
    *("/v1/messages/batches", "/v1/messages/batches/{id}", "/v1/messages/batches/{id}/cancel"),
    *(
        "/v1/messages/batches/{id}/results",
        "/v1/batches/{id}/cancel",
        "/tokenizer_info",
        "/inference/v1/generate",
    ),
    *("/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render"),
    *("/v1/completions/derender", "/v1/messages/render", "/v1/responses/render", "/invocations"),
    *("/v1/messages", "/v1/messages/count_tokens", "/api/hello", "/openapi.json", "/v1/responses"),
    *("/v1/responses/input_tokens", "/v1/responses/compact", "/v1/responses/{id}"),
    *("/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items", "/v1/conversations"),
    *("/v1/conversations/{id}", "/v1/conversations/{id}/items"),
    *("/v1/conversations/{id}/items/{item}", "/v1/decisions", "/v1/systemone", "/v1/admin/health"),
    *("/v1/admin/models", "/v1/admin/config", "/v1/admin/queue", "/v1/admin/ledger"),
    *("/v1/admin/requests/{id}", "/v1/admin/pause", "/v1/admin/drain", "/v1/admin/resume"),
    *("/v1/admin/reload_model", "/v1/admin/sleep", "/v1/admin/wake"),
    *("/v1/admin/reset_prefix_cache", "/v1/admin/profile", "/v1/admin/log_level"),
    *("/v1/admin/abort", "/v1/admin/is_paused", "/v1/admin/is_sleeping", "/v1/admin/shutdown"),
    *("/v1/admin/world_size", "/v1/admin/weights", "/v1/admin/update_weights"),
)
COLLECTIONS = (
    *("/v1/models", "/v1/requests", "/v1/responses", "/v1/files", "/v1/batches"),
    *("/v1/conversations", "/v1/admin/requests", "/v1/messages/batches", "/api/blobs"),
    *("/v1/chat/completions", "/slots"),
)
REASONS = ("stop", "length", "repetition", "abort", "error")
REJECTIONS = ("queue_full", "key_limit", "draining", "unavailable", "connections")

TABLE: tuple[Series, ...] = (
    Series(
        name="headrace_http_requests_total",
        kind=MetricKind.COUNTER,
        doc="HTTP requests answered. Status 499: the client left before the answer.",
        labels={"method": METHODS, "route": ROUTES, "status": STATUSES},
    ),
    Series(
        name="headrace_http_requests_in_flight",
        kind=MetricKind.GAUGE,
        doc="HTTP requests that are being answered now.",
    ),
    Series(
        name="headrace_grpc_requests_total",
        kind=MetricKind.COUNTER,
        doc="gRPC calls answered.",
        labels={"method": GRPC_METHODS, "code": GRPC_CODES},
    ),
    Series(
        name="headrace_websockets_open",
        kind=MetricKind.GAUGE,
        doc="WebSocket connections that are open.",
    ),
    Series(
        name="headrace_websockets_total",
        kind=MetricKind.COUNTER,
        doc="WebSocket connections that were opened.",
    ),
    Series(
        name="headrace_websocket_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="How long a WebSocket connection was open.",
        buckets=_LONG_SECONDS,
    ),
    Series(
        name="headrace_rejections_total",
        kind=MetricKind.COUNTER,
        doc="Requests refused for want of capacity (429, 503), by reason.",
        labels={"reason": REJECTIONS},
    ),
    Series(
        name="headrace_client_disconnects_total",
        kind=MetricKind.COUNTER,
        doc="Requests whose client left before the answer was complete.",
    ),
    Series(
        name="headrace_slow_readers_total",
        kind=MetricKind.COUNTER,
        doc="Streams ended because their reader took nothing for too long.",
    ),
    Series(
        name="headrace_event_loop_lag_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="How late a timer of an API process's event loop was, every half second.",
        buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
    ),
    Series(
        name="headrace_event_loop_alarms_total",
        kind=MetricKind.COUNTER,
        doc="Times such a timer was a quarter of a second late or more: every stream waited.",
    ),
    Series(
        name="headrace_request_success_total",
        kind=MetricKind.COUNTER,
        doc="Choices that ended, by reason.",
        labels={"finished_reason": REASONS},
    ),
    Series(
        name="headrace_prompt_tokens_total",
        kind=MetricKind.COUNTER,
        doc="Prompt tokens of started requests.",
    ),
    Series(
        name="headrace_generation_tokens_total", kind=MetricKind.COUNTER, doc="Tokens generated."
    ),
    Series(
        name="headrace_reasoning_tokens_total",
        kind=MetricKind.COUNTER,
        doc="Tokens generated that were reasoning, of choices that ended.",
    ),
    Series(
        name="headrace_cached_prompt_tokens_total",
        kind=MetricKind.COUNTER,
        doc="Prompt tokens found in the prefix cache.",
    ),
    Series(
        name="headrace_time_to_first_token_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="From the arrival of a request to its first token.",
        buckets=_SECONDS,
    ),
    Series(
        name="headrace_inter_token_latency_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="Mean time between the tokens of a choice.",
        buckets=_TOKEN_SECONDS,
    ),
    Series(
        name="headrace_request_queue_time_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="Time a request waited before it was first scheduled.",
        buckets=_SECONDS,
    ),
    Series(
        name="headrace_request_prefill_time_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="Time from being scheduled to the first token.",
        buckets=_SECONDS,
    ),
    Series(
        name="headrace_request_decode_time_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="Time from the first token to the last.",
        buckets=_SECONDS,
    ),
    Series(
        name="headrace_request_inference_time_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="Time from being scheduled to the last token.",
        buckets=_SECONDS,
    ),
    Series(
        name="headrace_e2e_request_latency_seconds",
        kind=MetricKind.HISTOGRAM,
        doc="From the arrival of a request to the end of its answer.",
        buckets=_SECONDS,
    ),
    Series(
        name="headrace_request_prompt_tokens",
        kind=MetricKind.HISTOGRAM,
        doc="Prompt tokens of a request.",
        buckets=_TOKENS,
    ),
    Series(
        name="headrace_request_generation_tokens",
        kind=MetricKind.HISTOGRAM,
        doc="Tokens generated for a choice.",
        buckets=_TOKENS,
    ),
    Series(
        name="headrace_request_n",
        kind=MetricKind.HISTOGRAM,
        doc="Choices that a request asked for.",
        buckets=_CHOICES,
    ),
    Series(
        name="headrace_request_preemptions",
        kind=MetricKind.HISTOGRAM,
        doc="How often a choice lost its place to others and was computed again.",
        buckets=_PREEMPTIONS,
    ),
    Series(
        name="headrace_request_max_tokens",
        kind=MetricKind.HISTOGRAM,
        doc="Tokens that a request asked for at most; those that named no number are not counted.",
        buckets=_TOKENS,
    ),
    Series(
        name="headrace_nonfinite_requests_total",
        kind=MetricKind.COUNTER,
        doc="Requests that ended because their logits were NaN or infinite.",
    ),
)


def template_of(path: str) -> str:
    """The route's template: a closed set, whatever clients ask for."""
    if path in ROUTES:
        return path
    for prefix in COLLECTIONS:
        if path.startswith(prefix + "/"):
            _, slash, rest = path.removeprefix(prefix + "/").partition("/")
            part, further, _ = rest.partition("/")
            template = f"{prefix}/{{id}}{slash}{part}{further and '/{item}'}"
            return template if template in ROUTES else prefix + "/{id}"
    return OTHER


class Metrics:
    """The counters of this process. Thread-safe as prometheus_client's own objects are."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._series = {series.name: series for series in TABLE}
        self._objects = {series.name: self._make(series) for series in TABLE}

    def _make(self, series: Series) -> Counter | Gauge | Histogram:
        labels = tuple(series.labels)
        if series.kind is MetricKind.COUNTER:
            return Counter(series.name, series.doc, labels, registry=self.registry)
        if series.kind is MetricKind.GAUGE:
            return Gauge(
                series.name, series.doc, labels, registry=self.registry, multiprocess_mode="livesum"
            )
        return Histogram(
            series.name, series.doc, labels, registry=self.registry, buckets=series.buckets
        )

    def _labels(self, name: str, labels: Mapping[str, str]) -> dict[str, str]:
        allowed = self._series[name].labels
        return {
            label: value if value in allowed[label] else OTHER for label, value in labels.items()
        }

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter or a gauge; label values outside the closed set count as "other"."""
        target = self._objects[name]
        assert isinstance(target, Counter | Gauge), f"{name} is a histogram"
        (target.labels(**self._labels(name, labels)) if labels else target).inc(amount)

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        target = self._objects[name]
        assert isinstance(target, Histogram), f"{name} is no histogram"
        target.observe(value)

    def exposition(self, engines: list[Mapping[str, object]]) -> bytes:
        """The Prometheus text: the series of the table, then what each engine core reported now."""
        if env.get("PROMETHEUS_MULTIPROC_DIR") is not None:
            merged = CollectorRegistry()
            MultiProcessCollector(merged)  # type: ignore[no-untyped-call]  # untyped library
            own = generate_latest(merged)
        else:
            own = generate_latest(self.registry)
        return own + _engine_text(engines) + further_text(engines)


def _engine_text(engines: list[Mapping[str, object]]) -> bytes:
    """Figures of the cores as gauges `headrace_engine_NAME{engine="i"}`, in a server of several
    models `{engine="MODEL"}`; only numbers with identifier names count, and why requests wait."""
    names = {name for one in engines for name, value in one.items() if _numbers(name, value)}
    lines: list[str] = []
    for name in sorted(names):
        lines.append(f"# TYPE headrace_engine_{name} gauge")
        for index, engine in enumerate(engines):
            label = f'engine="{engine.get("model", index)}"'
            for more, number in _numbers(name, engine.get(name)):
                lines.append(f"headrace_engine_{name}{{{label}{more}}} {float(number)}")
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _numbers(name: str, value: object) -> list[tuple[str, float]]:
    """With what each has for labels."""
    if name == "waiting_by_reason" and isinstance(value, Mapping):
        return [(f',reason="{escaped(str(reason))}"', n) for reason, n in value.items()]
    if isinstance(value, int | float) and name.isidentifier() and name.isascii():
        return [("", float(value))]
    return []


def metrics_page() -> str:
    """docs/METRICS.md, generated from the table."""
    rows = [
        f"| `{series.name}` | {series.kind.value} | {', '.join(series.labels) or '-'} | {series.doc} |"
        for series in TABLE
    ]
    head = "# Metrics\n\nGenerated from `headrace/base/telemetry/metrics.py`.\n\n"
    table = "| name | kind | labels | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
    names = "\n".join(
        f"| `{name}` | {ours} |" for ours, theirs in SERIES.items() for name in theirs
    )
    figures = "\n".join(
        f"| `{theirs}` | headrace_engine_{figure} |" for figure, (theirs, _) in FIGURES.items()
    )
    held = (
        "| `vllm:kv_cache_usage_perc` | headrace_engine_held_blocks / headrace_engine_total_blocks |\n"
        "| `vllm:cache_config_info` | tokens in a block and blocks in all, as labels |\n"
        "| `vllm:num_requests_waiting_by_reason` | headrace_engine_waiting_by_reason |\n"
        "| `vllm:iteration_tokens_total` | steps of the engine cores by their tokens |\n"
        "| `vllm:lora_requests_info` | adapters that run and wait, of requests in flight |\n"
        "| `http_requests_total` | headrace_http_requests, by class of status (2xx, 4xx ...) |"
    )
    mapped = (
        "\n\n## Names of vLLM\n\nWith `--metrics-compat vllm` these are told beside ours (suffixes of counters and "
        f"histograms stay), so that dashboards for vLLM work:\n\n| vLLM | ours |\n|---|---|\n{names}\n{figures}\n{held}"
    )
    tail = f"\n\n{FURTHER}"
    absent = "\n".join(f"| `{name}` | {why} |" for name, why in ABSENT.items())
    lacking = f"\n\nThese have no equal here:\n\n| vLLM | why |\n|---|---|\n{absent}"
    return head + table + tail + mapped + lacking + "\n"
