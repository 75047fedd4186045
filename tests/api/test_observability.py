"""Where a request's time went, in headers, stream comments, logs, traces and dashboards (OBS-01, OBS-03, OBS-05)."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.api.model_folder import write_model_folder
from tests.api.serving import NO_TLS, Served, eventually, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
PARTS = ("front_ms", "queue_ms", "prefill_ms", "decode_ms", "delivery_ms")


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP/HTTP collector: keeps the spans it is sent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        found = ExportTraceServiceRequest.FromString(body)
        for resource in found.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += list(scope.spans)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.spans = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, collector: Any) -> Iterator[Served]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    options = ("--otlp-endpoint", endpoint, "--metrics-names", "vllm", "--log-slow-s", "0.05")
    with serving(folder, *options, step_s=0.01) as found:
        yield found


@pytest.mark.serial
def test_the_parts_of_a_request_add_up(served: Served) -> None:
    answer = served.post("/v1/chat/completions", CHAT, **{"x-headrace-timing": "1"})
    told = dict(
        part.strip().split(";dur=")
        for part in answer.headers["server-timing"].split(",")
        if "dur=" in part
    )
    total = float(told.pop("total"))
    assert sum(map(float, told.values())) == pytest.approx(total, rel=0.01)
    assert 70 <= float(told["decode"]) < total
    assert "server-timing" not in served.post("/v1/chat/completions", CHAT).headers


def test_a_stream_tells_it_in_a_last_comment(served: Served) -> None:
    answer = served.post(
        "/v1/chat/completions", {**CHAT, "stream": True}, **{"x-headrace-timing": "1"}
    )
    last = answer.text.rstrip().split("\n\n")[-1]
    assert last.startswith(": timing ")
    told = json.loads(last.removeprefix(": timing "))
    assert told["num_output"] == 8 and told["reason"] == "length"
    assert sum(told[part] for part in PARTS) == pytest.approx(told["total_ms"], rel=0.01)
    assert ": timing" not in served.post("/v1/chat/completions", {**CHAT, "stream": True}).text


def test_a_slow_request_is_one_line_in_the_log(served: Served) -> None:
    ident = served.post("/v1/chat/completions", CHAT).headers["x-request-id"]
    eventually(lambda: any(ident in line for line in served.lines), within_s=5)
    line = next(line for line in served.lines if ident in line)
    assert json.loads(line[line.index("{") :])["request"] == ident


def spans_of(collector: Any, trace: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for span in list(collector.spans):
        if span.trace_id.hex() == trace:
            found.setdefault(span.name, []).append(span)
    return found


def finishes(span: Any) -> list[str]:
    return [
        attribute.value.string_value
        for event in span.events
        if event.name == "journey.FINISHED"
        for attribute in event.attributes
    ]


def test_one_trace_leads_from_the_caller_to_the_engine(served: Served, collector: Any) -> None:
    """OBS-01, REG-115."""
    served.post("/v1/chat/completions", CHAT, traceparent=f"00-{TRACE}-{PARENT}-01")
    eventually(lambda: len(spans_of(collector, TRACE)) == 2, within_s=15)
    spans = spans_of(collector, TRACE)
    (request,), (core,) = spans["llm_request"], spans["llm_core"]
    assert request.parent_span_id.hex() == PARENT and core.parent_span_id == request.span_id
    names = [event.name for event in core.events]
    assert names == [f"journey.{n}" for n in ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED")]
    told = {each.key: each.value for each in core.attributes}
    for name in ("id", "model", "max_tokens", "temperature", "top_p", "n"):
        assert f"gen_ai.request.{name}" in told, name
    assert told["gen_ai.request.max_tokens"].int_value == CHAT["max_tokens"]
    for old, new in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        counts = [told[f"gen_ai.usage.{name}"].int_value for name in (old, new)]
        assert counts[0] == counts[1] > 0
    parts = ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_inference")
    spent = {name: told[f"gen_ai.latency.{name}"].double_value for name in parts}
    assert 0 < spent["time_to_first_token"] <= spent["e2e"]
    assert spent["time_in_model_inference"] + spent["time_in_queue"] <= spent["e2e"] + 1e-6
    times = [event.time_unix_nano for event in core.events]
    assert times == sorted(times)


def test_a_client_that_leaves_ends_its_trace_once(served: Served, collector: Any) -> None:
    """OBS-01, REG-116."""
    trace = "1" * 32
    with httpx.stream(
        "POST",
        served.url + "/v1/chat/completions",
        json={**CHAT, "max_tokens": 500, "stream": True},
        headers={"traceparent": f"00-{trace}-{PARENT}-01"},
        verify=NO_TLS,
    ) as response:
        next(response.iter_bytes())
    eventually(lambda: len(spans_of(collector, trace)) == 2, within_s=15)
    (core,) = spans_of(collector, trace)["llm_core"]
    assert finishes(core) == ["abort"]


def test_dashboards_for_vllm_find_their_series(served: Served) -> None:
    text = served.get("/metrics").text
    names = {line.split("{")[0] for line in text.splitlines() if line.startswith("vllm:")}
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
        *("time_per_output_token_seconds_bucket", "request_time_per_output_token_seconds_count"),
        *("cache_config_info", "engine_sleep_state"),
    ):
        assert f"vllm:{name}" in names, name
    assert 'block_size="16"' in text and 'num_gpu_blocks="' in text
    ours = {line for line in text.splitlines() if line.startswith("headrace_generation_tokens")}
    theirs = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens")]
    assert theirs[0].split()[-1] == ours.pop().split()[-1]
