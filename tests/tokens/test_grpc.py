"""gRPC on a server with the model: the protocols of gateways and of vLLM's tools, spoken by clients of their own."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from headrace.base.telemetry.grpc_names import GRPC_METHODS
from headrace.front.server.grpc import control, engine, inference, render
from headrace.front.server.grpc.service import SERVING
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, eventually, serving

KEY, OTHER, ADMIN = "client-key-1", "other-key-1", "admin-key-1"
PORT = re.compile(r"headrace serves gRPC: (\S+)")
QUESTION = "What is 17 + 25?"
Code = grpc.StatusCode


def address_of(served: Served) -> str:
    eventually(lambda: any(PORT.search(line) for line in served.lines), within_s=5)
    return next(found[1] for line in served.lines if (found := PORT.search(line)))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = ("--threads", "1", "--grpc-port", "0", "--api-keys", f"{KEY},{OTHER}")
    more = ("--admin-key", ADMIN, "--api-servers", "2", "--tokenizer-info")
    with serving(None, *options, *more) as found:
        yield found
        assert found.stop() == 0


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address_of(served)) as made:
        yield made


def keyed(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def call(channel: grpc.Channel, service: Any, method: str, key: str = KEY, **given: Any) -> Any:
    """A call by the .proto files; a stream as a list."""
    asked, streams = service.request(method), service.described[method].server_streaming
    make = channel.unary_stream if streams else channel.unary_unary
    stub = make(
        f"/{service.full_name}/{method}",
        request_serializer=asked.SerializeToString,
        response_deserializer=service.response(method).FromString,
    )
    found = stub(asked(**given), metadata=keyed(key), timeout=300)
    return list(found) if streams else found


def refusal(channel: grpc.Channel, service: Any, method: str, key: str = KEY, **given: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, service, method, key, **given)
    assert caught.value.details()
    return caught.value.code()


def http(served: Served, path: str, document: object, key: str = KEY) -> Any:
    answer = served.post(path, document, **{"x-api-key": key})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rendered(served: Served) -> list[int]:
    chat = {"messages": [{"role": "user", "content": QUESTION}]}
    ids: list[int] = http(served, "/v1/chat/completions/render", chat)["token_ids"]
    return ids


def test_every_method_of_the_tables_is_served_counted_and_guarded_as_its_route(
    served: Served,
) -> None:
    names = set()
    for service in SERVING:
        assert set(service.methods) == set(service.described)
        names |= set(service.methods)
    assert names == set(GRPC_METHODS)


def test_a_gateways_own_client_reads_our_engine_service(
    served: Served, channel: grpc.Channel
) -> None:
    """The client is generated from the gateway's files: numbers and types of fields must be the same."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    ids = rendered(served)
    sampling = vllm_engine_pb2.SamplingParams(
        temperature=0.0, max_tokens=8, logprobs=2, skip_special_tokens=True, n=1
    )
    tokenized = vllm_engine_pb2.TokenizedInput(original_text=QUESTION, input_ids=ids)
    asked = {"request_id": "r-1", "tokenized": tokenized, "sampling_params": sampling}
    parts = list(
        stub.Generate(vllm_engine_pb2.GenerateRequest(**asked, stream=True), metadata=keyed(KEY))
    )
    (whole,) = stub.Generate(vllm_engine_pb2.GenerateRequest(**asked), metadata=keyed(KEY))
    body = {"token_ids": ids, "sampling_params": {"temperature": 0, "max_tokens": 8, "logprobs": 2}}
    wanted = http(served, "/inference/v1/generate", body)["choices"][0]
    assert list(whole.complete.output_ids) == wanted["token_ids"]
    assert [i for part in parts[:-1] for i in part.chunk.token_ids] == wanted["token_ids"]
    assert parts[-1].complete.finish_reason == wanted["finish_reason"] == "stop"
    assert whole.complete.prompt_tokens == len(ids)
    assert whole.complete.completion_tokens == len(wanted["token_ids"])
    scores = whole.complete.output_logprobs
    told = wanted["logprobs"]["content"]
    assert list(scores.token_logprobs) == pytest.approx([one["logprob"] for one in told], abs=1e-4)
    assert [len(one.values) for one in scores.top_logprobs] == [2] * len(told)

    info = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), metadata=keyed(KEY))
    assert info.is_generation and info.max_context_length > 0 and info.eos_token_ids
    state = stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), metadata=keyed(KEY))
    assert state.block_size == 16 and state.max_num_seqs > 0 and not state.is_paused
    load = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), metadata=keyed(KEY))
    assert load.dp_rank_count == 1 and load.loads[0].max_total_num_tokens > 0
    assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), metadata=keyed(KEY)).healthy
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=keyed(KEY)))
    assert chunks[-1].sha256 and not any(one.sha256 for one in chunks[:-1])
    files = zipfile.ZipFile(io.BytesIO(b"".join(one.data for one in chunks)))
    assert "tokenizer.json" in files.namelist()
    done = stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=keyed(ADMIN))
    assert done.success


def test_a_constraint_and_a_stop_string_hold(served: Served, channel: grpc.Channel) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=rendered(served))
    choices = vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"])
    for sampling, wanted in (
        (vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=8, choice=choices), None),
        (vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=8, stop=["2"]), "2"),
    ):
        asked = vllm_engine_pb2.GenerateRequest(tokenized=tokenized, sampling_params=sampling)
        (whole,) = stub.Generate(asked, metadata=keyed(KEY))
        ids = {"tokens": list(whole.complete.output_ids)}
        text = http(served, "/detokenize", ids)["prompt"]
        if wanted is None:
            assert text.startswith(("yes", "no"))
        else:
            assert whole.complete.matched_stop_str == wanted


def test_text_in_text_out_is_the_completion_of_http(served: Served, channel: grpc.Channel) -> None:
    given = {
        "text": "The fox went to the river",
        "temperature": 0.0,
        "stopping": {"max_new_tokens": 6, "ignore_eos": True},
        "response": {"output_token_ids": True, "output_logprobs": True, "prompt_logprobs": True},
    }
    whole = call(channel, inference.SERVICE, "Generate", **given)
    parts = call(channel, inference.SERVICE, "GenerateStream", **given)
    body = {"prompt": given["text"], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    wanted = http(served, "/v1/completions", body)
    assert whole.outputs.text == wanted["choices"][0]["text"]
    assert "".join(part.outputs.text for part in parts) == whole.outputs.text
    assert list(whole.outputs.token_ids) == [i for p in parts for i in p.outputs.token_ids]
    assert len(whole.outputs.logprobs) == whole.outputs.num_tokens == 6
    assert whole.prompt_info.num_prompt_tokens == wanted["usage"]["prompt_tokens"]
    assert len(whole.prompt_info.logprobs) == whole.prompt_info.num_prompt_tokens
    assert [part.HasField("prompt_info") for part in parts] == [True] + [False] * (len(parts) - 1)
    assert (
        whole.outputs.finish_info.finish_reason == 1
        and whole.outputs.finish_info.num_output_tokens == 6
    )
    several = call(
        channel, inference.SERVICE, "GenerateStream", **{**given, "sampling": {"num_sequences": 2}}
    )
    assert {part.outputs.index for part in several} == {0, 1}


def test_control_does_what_the_admin_routes_do(served: Served, channel: grpc.Channel) -> None:
    def control_call(method: str, **given: Any) -> Any:
        return call(channel, control.SERVICE, method, ADMIN, **given)

    info = control_call("GetServerInfo")
    assert info.kv_block_size == 16 and info.parallelism.world_size == 1
    assert control_call("GetModelInfo").served_model_name
    control_call("PauseGeneration", mode=3)
    assert control_call("IsPaused").paused
    assert served.get("/is_paused", **{"x-api-key": ADMIN}).json() == {"is_paused": True}
    control_call("ResumeGeneration")
    control_call("Sleep", level=1, mode=2)
    assert control_call("IsSleeping").sleeping
    control_call("WakeUp", tags=["weights", "kv_cache"])
    assert not control_call("IsSleeping").sleeping and not control_call("IsPaused").paused
    assert not control_call("ListLoras").adapters
    assert not control_call("GetKvEventSources").sources
    assert refusal(channel, control.SERVICE, "UpdateWeights", ADMIN) is Code.UNIMPLEMENTED
    control_call("UpdateWeightVersion", weight_version="step-7")
    assert control_call("GetWeightVersion").weight_version == "step-7"
    told = served.get("/get_weight_version", **{"x-api-key": ADMIN}).json()
    assert told == {"weight_version": "step-7"}
    for wrong in ("", "two words"):
        code = refusal(channel, control.SERVICE, "UpdateWeightVersion", ADMIN, weight_version=wrong)
        assert code is Code.INVALID_ARGUMENT
    assert refusal(channel, control.SERVICE, "Sleep", ADMIN, level=7) is Code.INVALID_ARGUMENT
    assert refusal(channel, control.SERVICE, "WakeUp", ADMIN, tags=["x"]) is Code.INVALID_ARGUMENT


def test_keys_open_over_grpc_what_they_open_over_http(channel: grpc.Channel) -> None:
    """P3."""
    for service in SERVING:
        for method, rpc in service.methods.items():
            if method == "Shutdown" or rpc.route == "/health":
                continue
            assert refusal(channel, service, method, "wrong") is Code.UNAUTHENTICATED, method
    for method in control.SERVICE.methods:
        assert refusal(channel, control.SERVICE, method, KEY) is Code.PERMISSION_DENIED, method
    assert refusal(channel, engine.SERVICE, "FlushCache", KEY) is Code.PERMISSION_DENIED
    assert refusal(channel, render.SERVICE, "Tokenize", ADMIN, prompt="x") is Code.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("service", "method", "given", "code"),
    [
        (inference.SERVICE, "Generate", {}, Code.INVALID_ARGUMENT),
        (inference.SERVICE, "Generate", {"text": "x", "temperature": 9.0}, Code.INVALID_ARGUMENT),
        (inference.SERVICE, "Generate", {"text": "fox " * 500_000}, Code.INVALID_ARGUMENT),
        (inference.SERVICE, "Generate", {"text": "x", "model": "other"}, Code.NOT_FOUND),
        (inference.SERVICE, "Generate", {"text": "x", "lora_name": "a"}, Code.NOT_FOUND),
        (
            inference.SERVICE,
            "Generate",
            {"text": "x", "sampling": {"num_sequences": 2}},
            Code.INVALID_ARGUMENT,
        ),
        (
            inference.SERVICE,
            "Generate",
            {"text": "x", "kv": {"kv_transfer_params": b"x"}},
            Code.INVALID_ARGUMENT,
        ),
        (engine.SERVICE, "Generate", {"text": "x", "media_refs": b"x"}, Code.UNIMPLEMENTED),
        (
            engine.SERVICE,
            "Generate",
            {"tokenized": {"input_ids": [10**8]}},
            Code.INVALID_ARGUMENT,
        ),
        *(
            (
                engine.SERVICE,
                "Generate",
                {**prompt, "sampling_params": {"truncate_prompt_tokens": keep}},
                Code.INVALID_ARGUMENT,
            )
            for prompt in ({"text": "x"}, {"tokenized": {"input_ids": [5, 6]}})
            for keep in (-2, -(2**31), 0)
        ),
        (engine.SERVICE, "Embed", {}, Code.INVALID_ARGUMENT),
        *(
            (render.SERVICE, method, {"sampling": "[1]"}, Code.INVALID_ARGUMENT)
            for method in ("RenderChat", "RenderCompletion")
        ),
    ],
)
def test_what_is_wrong_has_the_code_that_says_so(
    channel: grpc.Channel, service: Any, method: str, given: dict[str, Any], code: grpc.StatusCode
) -> None:
    assert refusal(channel, service, method, **given) is code


def test_bytes_that_are_no_message_are_refused_behind_the_key(
    served: Served, channel: grpc.Channel
) -> None:
    """They were UNKNOWN, with a trace in the log for everyone who asked (P19)."""
    send = channel.unary_unary(f"/{control.SERVICE.full_name}/GetModelInfo")
    for metadata, code in (([], Code.UNAUTHENTICATED), (keyed(ADMIN), Code.INVALID_ARGUMENT)):
        with pytest.raises(grpc.RpcError) as caught:
            send(b"\xff\xff", metadata=metadata, timeout=300)
        assert caught.value.code() is code, caught.value.details()
    assert not any("DecodeError" in line for line in served.lines)


def test_a_call_that_is_cancelled_or_aborted_holds_nothing(
    served: Served, channel: grpc.Channel
) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    sampling = vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)

    def begin(ident: str) -> Any:
        asked = vllm_engine_pb2.GenerateRequest(
            request_id=ident, text="Once", sampling_params=sampling, stream=True
        )
        answers = stub.Generate(asked, metadata=keyed(KEY))
        next(answers)
        return answers

    def num_running() -> int:
        found = served.get("/v1/requests", **{"x-api-key": KEY}).json()["engines"][0]
        return int(found["running"] + found["held_blocks"])

    begin("one").cancel()
    eventually(lambda: num_running() == 0, within_s=10)
    answers = begin("two")
    asked = vllm_engine_pb2.AbortRequest(request_ids=["two"])
    stub.Abort(asked, metadata=keyed(OTHER))
    assert next(answers).chunk.token_ids, "another key's id is another id"
    stub.Abort(asked, metadata=keyed(KEY))
    assert list(answers)[-1].complete.finish_reason == "abort"
    eventually(lambda: num_running() == 0, within_s=10)


def _serves(stub: Any, name: str) -> bool:
    """Readiness is looked at now and then."""
    asked = health_pb2.HealthCheckRequest(service=name)
    return bool(stub.Check(asked, timeout=300).status == health_pb2.HealthCheckResponse.SERVING)


def test_health_follows_readiness_and_reflection_tells_the_tables(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    told = ProtoReflectionDescriptorDatabase(channel)
    for service in SERVING:
        eventually(partial(_serves, stub, service.full_name), within_s=30)
        assert service.full_name in told.get_services()
        file = told.FindFileContainingSymbol(service.full_name)
        assert file.package == service.full_name.rpartition(".")[0]


def test_calls_are_counted(served: Served, channel: grpc.Channel) -> None:
    call(channel, inference.SERVICE, "Generate", text="x", stopping={"max_new_tokens": 1})
    text = served.get("/metrics").text
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("headrace_grpc_requests_total")
        and 'method="Generate"' in line
        and 'code="OK"' in line
    ]
    assert float(line.split()[-1]) >= 1


@pytest.mark.parametrize(("keep", "num_prompt"), [(-1, 3), (2, 2)])
def test_a_prompt_is_cut_to_its_last_tokens(
    channel: grpc.Channel, keep: int, num_prompt: int
) -> None:
    """-1: to what the model can hold."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    sampling = vllm_engine_pb2.SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7])
    asked = vllm_engine_pb2.GenerateRequest(tokenized=tokenized, sampling_params=sampling)
    (whole,) = stub.Generate(asked, metadata=keyed(KEY))
    assert whole.complete.prompt_tokens == num_prompt


@pytest.mark.slow
def test_the_port_of_another_server_is_refused_at_start(served: Served) -> None:
    """Not shared with it: half of the calls would reach the wrong server."""
    port = address_of(served).rpartition(":")[2]
    for command in ("serve", "render"):
        words = [sys.executable, "-m", "headrace", command, "--port", "0", "--grpc-port", port]
        ended = subprocess.run(words, capture_output=True, text=True)
        assert ended.returncode == 2, ended
        assert f"127.0.0.1:{port}" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_servers_own_end_can_be_asked_for(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "tiny")
    with serving(model, "--grpc-port", "0", "--admin-key", ADMIN) as served:
        with grpc.insecure_channel(address_of(served)) as channel:
            assert refusal(channel, engine.SERVICE, "GetTokenizer") is Code.NOT_FOUND
            call(channel, control.SERVICE, "Shutdown", ADMIN)
        assert served.process.wait(300) == 0
