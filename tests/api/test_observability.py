"""Where a request's time went, in headers, stream comments, logs, traces and dashboards (OBS-01, OBS-03, OBS-05)."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from websockets.sync.client import connect

from headrace.base.telemetry.metrics import ROUTES
from headrace.front.server.grpc import inference
from headrace.front.server.table import admin_routes, table
from tests.api.model_folder import write_model_folder
from tests.api.serving import NO_TLS, Served, eventually, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
OFTEN = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
"""Milliseconds between the spans' travels to the collector, 5,000 by default."""
PARTS = ("front_ms", "queue_ms", "prefill_ms", "decode_ms", "delivery_ms")


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP/HTTP collector: keeps the spans it is sent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        found = ExportTraceServiceRequest.FromString(body)
        for resource in found.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += list(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.spans = []
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
    options = ("--otlp-endpoint", endpoint, "--metrics-compat", "vllm", "--log-slow-s", "0.05")
    with serving(folder, *options, "--grpc-port", "0", step_s=0.01, **OFTEN) as found:
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
    # Eight steps of 10 ms; when the first token is seen, between the two, is the loop's affair.
    assert 79 <= float(told["prefill"]) + float(told["decode"]) < total
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
        json={**CHAT, "max_tokens": 1500, "stream": True},
        headers={"traceparent": f"00-{trace}-{PARENT}-01"},
        timeout=300,
        verify=NO_TLS,
    ) as response:
        next(response.iter_bytes())
    eventually(lambda: len(spans_of(collector, trace)) == 2, within_s=15)
    (core,) = spans_of(collector, trace)["llm_core"]
    assert finishes(core) == ["abort"]


def test_what_runs_in_the_background_ends_its_trace_once(served: Served, collector: Any) -> None:
    """The trace is the response's, not that of the request which was answered at once; a cancelled one is aborted."""
    for trace, tokens, reason in (("2" * 32, 4, "length"), ("3" * 32, 2000, "abort")):
        asked = {"input": "fox", "background": True, "max_output_tokens": tokens, "ignore_eos": True}  # fmt: skip
        traceparent = f"00-{trace}-{PARENT}-01"
        ident = served.post("/v1/responses", asked, traceparent=traceparent).json()["id"]
        if reason == "abort":
            eventually(
                lambda: served.get(f"/v1/responses/{ident}").json()["status"] == "in_progress",  # noqa: B023 (called in this turn)
                within_s=10,
            )
            served.post(f"/v1/responses/{ident}/cancel", {})
        eventually(lambda: len(spans_of(collector, trace)) == 2, within_s=15)  # noqa: B023 (as above)
        (request,), (core,) = spans_of(collector, trace).values()
        assert {request.name, core.name} == {"llm_request", "llm_core"}
        (core,) = spans_of(collector, trace)["llm_core"]
        assert finishes(core) == [reason]


def test_each_line_of_a_batch_has_a_trace_that_ends_with_it(served: Served, collector: Any) -> None:
    lines = [
        {
            "custom_id": f"{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "fox", **more},
        }
        for i, more in enumerate(({"max_tokens": 2}, {"temperature": 9}))
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    sent = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    file = httpx.post(served.url + "/v1/files", **sent, verify=NO_TLS, timeout=300).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = served.post("/v1/batches", asked).json()["id"]
    eventually(
        lambda: served.get(f"/v1/batches/{made}").json()["status"] == "completed", within_s=30
    )

    def told() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for span in collector.spans:
            facts = {a.key: a.value for a in span.attributes}
            if facts.get("url.path") and facts["url.path"].string_value == "/v1/completions":
                found.setdefault(facts["headrace.request_id"].string_value, []).append(
                    facts["http.response.status_code"].int_value
                )
        return found

    batch = served.get(f"/v1/batches/{made}").json()
    answers = {}
    for name in ("output_file_id", "error_file_id"):
        line = json.loads(served.get(f"/v1/files/{batch[name]}/content").text)
        answers[line["response"]["request_id"]] = [line["response"]["status_code"]]
    assert sorted(answers.values()) == [[200], [400]]
    eventually(lambda: answers.items() <= told().items(), within_s=15)


def test_each_response_over_a_websocket_has_a_trace(served: Served, collector: Any) -> None:
    trace = "4" * 32
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    url = served.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers=headers) as socket:
        for more in ({}, {"temperature": 9}, {"max_output_tokens": 2000}):
            asked = {"type": "response.create", "input": "fox", "max_output_tokens": 3}
            socket.send(json.dumps({**asked, "ignore_eos": True, **more}))
            kind = ""
            while kind not in ("response.incomplete", "error", "response.output_text.delta"):
                kind = json.loads(socket.recv(timeout=300))["type"]
                if kind == "response.output_text.delta" and "max_output_tokens" not in more:
                    kind = ""
    eventually(lambda: len(spans_of(collector, trace).get("llm_request", [])) == 3, within_s=15)
    spans = spans_of(collector, trace)
    statuses = {
        attribute.value.int_value
        for span in spans["llm_request"]
        for attribute in span.attributes
        if attribute.key == "http.response.status_code"
    }
    assert statuses == {200, 400, 499}
    assert sorted(finishes(core)[0] for core in spans["llm_core"]) == ["abort", "length"]


@pytest.mark.slow
def test_preemptions_are_told_and_a_dead_engine_ends_the_trace_once(
    collector: Any, tmp_path: Path
) -> None:
    """OBS-01: two requests share a cache that holds one of them; then their core is killed."""
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    options = ("--otlp-endpoint", endpoint, "--kv-blocks", "8", "--block-tokens", "16")
    options += ("--admin-key", "root")
    folder = write_model_folder(tmp_path / "model")
    asked = {"prompt": "fox", "max_tokens": 100, "ignore_eos": True}
    with (
        serving(folder, *options, step_s=0.01, **OFTEN) as small,
        ThreadPoolExecutor(1) as pool,
    ):
        traces = ["5" * 32, "6" * 32, "7" * 32]

        def ask(trace: str, tokens: int = 100) -> int:
            body = {**asked, "max_tokens": tokens}
            traceparent = f"00-{trace}-{PARENT}-01"
            return small.post("/v1/completions", body, traceparent=traceparent).status_code

        together = [partial(ask, trace) for trace in traces[:2]]
        assert asked_together(small, *together) == [200, 200]
        (core,) = small.cores
        killed = pool.submit(ask, traces[2], 110)
        eventually(lambda: small.ledger()["engines"][0]["running"] == 1, within_s=5)
        core.kill()
        assert killed.result(300) >= 500
        eventually(lambda: all(len(spans_of(collector, t)) == 2 for t in traces), within_s=15)
    cores = [spans_of(collector, trace)["llm_core"] for trace in traces]
    assert [[finishes(core) for core in each] for each in cores] == [[["length"]]] * 2 + [[["error"]]]  # fmt: skip
    names = [event.name for (core,) in cores[:2] for event in core.events]
    assert "journey.PREEMPTED" in names


def statuses_of(collector: Any, trace: str) -> list[int]:
    return [
        attribute.value.int_value
        for span in spans_of(collector, trace).get("llm_request", [])
        for attribute in span.attributes
        if attribute.key == "http.response.status_code"
    ]


def test_what_is_refused_wrong_or_late_ends_its_trace_once(collector: Any, tmp_path: Path) -> None:
    """OBS-01, REG-116: one request span with the status, and at most one of the engine, finished once."""
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    options = ("--max-running", "1", "--max-queued-requests", "0")
    folder = write_model_folder(tmp_path / "model")
    asked = {"prompt": "fox", "ignore_eos": True}
    with (
        serving(folder, "--otlp-endpoint", endpoint, *options, step_s=0.02, **OFTEN) as small,
        ThreadPoolExecutor(1) as pool,
    ):

        def ask(trace: str, **more: object) -> int:
            traceparent = f"00-{trace}-{PARENT}-01"
            found = small.post("/v1/completions", {**asked, **more}, traceparent=traceparent)
            return found.status_code

        traces = [f"{number:032x}" for number in range(0xA1, 0xA6)]
        long = pool.submit(ask, traces[0], max_tokens=120)
        eventually(lambda: small.ledger()["engines"][0]["running"] == 1, within_s=5)
        refused = ask(traces[1], max_tokens=4)
        assert (long.result(300), refused) == (200, 503)
        assert ask(traces[2], max_tokens=200, timeout_s=0.1) == 504
        assert ask(traces[3], max_tokens=-1) == 400
        assert ask(traces[4], max_tokens=10**6) == 400
        wanted = [[200], [503], [504], [400], [400]]
        eventually(lambda: [statuses_of(collector, t) for t in traces] == wanted, within_s=15)
    ends = [[finishes(core) for core in spans_of(collector, t).get("llm_core", [])] for t in traces]
    assert ends[0] == [["length"]] and ends[3] == []
    # The third's time may be over before the engine hears of it.
    assert all(ends[number] in ([], [["error"]]) for number in (1, 2, 4))


def test_a_call_over_grpc_has_its_callers_trace(served: Served, collector: Any) -> None:
    """OBS-01: the traceparent of the metadata; a call that is cancelled is a client that left."""
    address = next(line.split()[-1] for line in served.lines if "serves gRPC" in line)
    service = inference.SERVICE
    asked = service.request("GenerateStream")
    with grpc.insecure_channel(address) as channel:
        stub = channel.unary_stream(
            f"/{service.full_name}/GenerateStream",
            request_serializer=asked.SerializeToString,
            response_deserializer=service.response("GenerateStream").FromString,
        )
        for trace, tokens in (("8" * 32, 3), ("9" * 32, 1500)):
            given = asked(text="fox", stopping={"max_new_tokens": tokens, "ignore_eos": True})
            metadata = [("traceparent", f"00-{trace}-{PARENT}-01")]
            answers = stub(given, metadata=metadata, timeout=300)
            next(answers)
            if tokens > 3:
                answers.cancel()
            else:
                list(answers)
    for trace, reason, status in (("8" * 32, "length", 200), ("9" * 32, "abort", 499)):
        eventually(lambda: len(spans_of(collector, trace)) == 2, within_s=15)  # noqa: B023 (called in this turn)
        (request,), (core,) = (spans_of(collector, trace)[n] for n in ("llm_request", "llm_core"))
        assert request.parent_span_id.hex() == PARENT and core.parent_span_id == request.span_id
        assert finishes(core) == [reason] and statuses_of(collector, trace) == [status]


def test_every_route_is_counted_under_its_own_name(served: Served) -> None:
    """A new row of the table belongs into ROUTES; ids never do (P20)."""
    rows = {route.path.replace(":path", "") for route in (*table(), *admin_routes())}
    assert rows == set(ROUTES)
    asked = {
        "/v1/conversations/conv_1/items/msg_1": "/v1/conversations/{id}/items/{item}",
        "/v1/conversations/conv_1/items": "/v1/conversations/{id}/items",
        "/v1/responses/resp_1/input_items": "/v1/responses/{id}/input_items",
        "/v1/models/a/b": "/v1/models/{id}",
        "/v1/nothing": "other",
    }
    for path in asked:
        served.get(path)
    text = served.get("/metrics").text
    counted = set(re.findall(r'http_requests_total{method="GET",route="([^"]+)"', text))
    assert set(asked.values()) <= counted <= {*ROUTES, "other"}


def asked_together(served: Served, *requests: Callable[[], int]) -> list[int]:
    """The statuses of requests that begin in the same step: until all of them wait, the engine is paused."""
    admin = {"x-api-key": "root"}
    with ThreadPoolExecutor(len(requests)) as pool:
        assert served.post("/pause?mode=keep", {}, **admin).status_code == 200
        asked = [pool.submit(request) for request in requests]
        eventually(lambda: served.ledger()["engines"][0]["waiting"] == len(asked), within_s=30)
        assert served.post("/resume", {}, **admin).status_code == 200
        return [each.result(300) for each in asked]


STEPPED = "vllm:iteration_tokens_total_sum"


def series(served: Served) -> dict[str, float]:
    """Every line of /metrics, by name and labels."""
    lines = [line for line in served.get("/metrics").text.splitlines() if line[:1] not in ("#", "")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_every_series_moves_as_a_scripted_run_predicts(tmp_path: Path) -> None:
    """OBS-03: a plain answer, one of two choices, one that is aborted, two that take each other's KV blocks."""
    folder = write_model_folder(tmp_path / "model")
    options = ("--metrics-compat", "vllm", "--kv-blocks", "8", "--block-tokens", "16")
    with serving(folder, *options, "--admin-key", "root", step_s=0.01) as small:

        def ask(**more: object) -> int:
            asked = {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True, **more}
            return small.post("/v1/completions", asked).status_code

        def moved(before: dict[str, float]) -> dict[str, float]:
            names = {
                "prompt": "headrace_prompt_tokens_total",
                "generated": "headrace_generation_tokens_total",
                "length": 'headrace_request_success_total{finished_reason="length"}',
                "aborted": 'headrace_request_success_total{finished_reason="abort"}',
                "requests": "headrace_request_n_count",
                "choices": "headrace_request_n_sum",
                "wanted": "headrace_request_max_tokens_sum",
                "first": "headrace_time_to_first_token_seconds_count",
                "ended": "headrace_e2e_request_latency_seconds_count",
                "stepped": next(name for name in before if name.startswith(STEPPED)),
                "preempted": 'headrace_engine_preemptions{engine="0"}',
                "left": "headrace_client_disconnects_total",
            }
            now = series(small)
            return {k: now.get(name, 0) - before.get(name, 0) for k, name in names.items()}

        before = series(small)
        assert ask() == 200
        one = {
            "prompt": 10,
            "generated": 4,
            "length": 1,
            "requests": 1,
            "choices": 1,
            "wanted": 4,
            "first": 1,
        }
        still = {"ended": 1, "stepped": 13, "preempted": 0, "left": 0, "aborted": 0}
        assert moved(before) == {**one, **still}
        before = series(small)
        assert ask(n=2, prompt=[6] * 10) == 200
        two = {
            "prompt": 10,
            "generated": 8,
            "length": 2,
            "requests": 1,
            "choices": 2,
            "wanted": 4,
            "first": 2,
        }
        assert moved(before) == {**two, **still, "ended": 2, "stepped": 26}
        before = series(small)
        body = {"prompt": [7] * 10, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", small.url + "/v1/completions", json=body, timeout=300, verify=NO_TLS
        ) as it:
            told = sum(1 for _, line in zip(range(9), it.iter_lines(), strict=False) if line)
        eventually(lambda: moved(before)["aborted"] == 1, within_s=5)
        found = moved(before)
        assert found["left"] == 1 and told <= found["generated"] < 100
        assert (found["prompt"], found["first"], found["ended"], found["length"]) == (10, 1, 0, 0)
        before = series(small)
        both = [partial(ask, prompt=[8 + i] * 10, max_tokens=100) for i in range(2)]
        assert asked_together(small, *both) == [200, 200]
        found = moved(before)
        assert found["preempted"] >= 1 and found["stepped"] > 2 * 109, "computed again"
        counted = {
            "prompt": 20,
            "generated": 200,
            "length": 2,
            "requests": 2,
            "choices": 2,
            "wanted": 200,
        }
        assert {name: found[name] for name in counted} == counted, "and counted once"


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
        *("cache_config_info", "engine_sleep_state", "iteration_tokens_total_bucket"),
        *("request_params_n_count", "request_params_max_tokens_sum", "corrupted_requests_total"),
        *("websocket_connections_active", "websocket_connections_total"),
    ):
        assert f"vllm:{name}" in names, name
    assert 'block_size="16"' in text and 'num_gpu_blocks="' in text
    ours = {line for line in text.splitlines() if line.startswith("headrace_generation_tokens")}
    theirs = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens")]
    assert theirs[0].split()[-1] == ours.pop().split()[-1]
