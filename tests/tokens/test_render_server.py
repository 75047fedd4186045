"""`headrace render`: no torch, small, quick; HTTP and gRPC agree with the server that has the model (API-19)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from headrace.front.server.grpc.render import SERVICE
from tests.api.serving import NO_TLS, Served
from tests.stopwatch import Stopwatch
from tests.tokens.conftest import Renderer
from tests.tokens.test_generate import CHATS, post

READY_S = 2.0
RSS_BYTES = 150 << 20


@pytest.mark.serial
def test_it_is_ready_soon_and_small_and_has_no_torch(renderer: Renderer) -> None:
    """The best of three starts: other work on the machine may slow one down."""
    process = psutil.Process(renderer.process.pid)
    assert process.memory_info().rss < RSS_BYTES
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    starts = [renderer.ready_s]
    while starts[-1] > READY_S and len(starts) < 3:
        starts.append(_one_start())
    assert min(starts) < READY_S, starts


def _one_start() -> float:
    command = [*(sys.executable, "-m", "headrace", "render"), *("--port", "0", "--grpc-port", "0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = [process.stdout.readline() for _ in range(2)][1]
        process.terminate()
    return float(line.rpartition("(")[2].partition(" ")[0])


@pytest.mark.serial
def test_a_kept_connection_does_not_wait_for_acknowledgements(renderer: Renderer) -> None:
    """An answer is two writes; the second does not wait for the delayed acknowledgement (40 ms) of the first."""
    times = []
    with httpx.Client(base_url=renderer.url, verify=NO_TLS, timeout=300) as client:
        for _ in range(30):
            watch = Stopwatch()
            assert client.get("/version").status_code == 200
            times.append(watch.undisturbed_s)
    assert sorted(times)[15] < 0.03, times


def test_its_modules_import_no_torch() -> None:
    """API-23."""
    check = (
        "import sys, headrace.cli.render, headrace.front.server.grpc.service;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize("chat", CHATS[:4], ids=range(4))
def test_it_renders_what_the_server_with_the_model_renders(
    renderer: Renderer, bundled: Served, chat: dict[str, Any]
) -> None:
    here = httpx.post(
        renderer.url + "/v1/chat/completions/render", json=chat, verify=NO_TLS, timeout=300
    ).json()
    there = post(bundled, "/v1/chat/completions/render", chat)
    assert {**here, "request_id": ""} == {**there, "request_id": ""}
    generated = post(
        bundled,
        "/inference/v1/generate",
        {**here, "sampling_params": {"max_tokens": 4, "n": chat.get("n")}},
    )
    answer = httpx.post(
        renderer.url + "/v1/chat/completions/derender",
        json={"request": chat, "response": generated},
        verify=NO_TLS,
        timeout=300,
    )
    assert answer.status_code == 200 and answer.json()["object"] == "chat.completion"


QUESTION = "What is 17 + 25?"
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 20,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": QUESTION}],
    },
    "/v1/responses": {
        "max_output_tokens": 20,
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": QUESTION}],
    },
}


@pytest.mark.parametrize("path", DIALECTS)
def test_the_other_dialects_render_to_the_same_prompt(
    renderer: Renderer, bundled: Served, path: str
) -> None:
    """The same conversation has the same ids, here and on the server with the model, which counts as many."""
    body = DIALECTS[path]
    made = httpx.post(renderer.url + path + "/render", json=body, timeout=300).json()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = {"messages": messages, "max_tokens": 20}
    wanted = httpx.post(renderer.url + "/v1/chat/completions/render", json=chat, timeout=300).json()
    assert made["token_ids"] == wanted["token_ids"]
    assert made["sampling_params"]["max_tokens"] == 20
    generated = post(bundled, "/inference/v1/generate", made)
    assert generated["usage"]["prompt_tokens"] == len(made["token_ids"])
    counting = {"/v1/messages": "count_tokens", "/v1/responses": "input_tokens"}[path]
    counted = httpx.post(f"{bundled.url}{path}/{counting}", json=body, timeout=300).json()
    assert counted["input_tokens"] == len(made["token_ids"])


def test_what_is_wrong_with_another_dialect_is_told_in_its_words(renderer: Renderer) -> None:
    body = {**DIALECTS["/v1/responses"], "previous_response_id": "resp_x"}
    answer = httpx.post(renderer.url + "/v1/responses/render", json=body, timeout=300)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"
    body = {**DIALECTS["/v1/messages"], "messages": [{"role": "user", "content": 3}]}
    answer = httpx.post(renderer.url + "/v1/messages/render", json=body, timeout=300)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert "messages[0]" in answer.json()["error"]["message"]


def test_what_needs_a_model_is_answered_with_501(renderer: Renderer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "x"}),
        ("/inference/v1/generate", {"token_ids": [1]}),
    ):
        answer = httpx.post(renderer.url + path, json=body, verify=NO_TLS, timeout=300)
        assert answer.status_code == 501 and "no model" in answer.json()["error"]["message"]
    assert httpx.get(renderer.url + "/health", verify=NO_TLS, timeout=300).status_code == 200


@pytest.fixture
def channel(renderer: Renderer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(renderer.grpc) as made:
        yield made


def call(channel: grpc.Channel, method: str, message: Any) -> Any:
    stub = channel.unary_unary(
        f"/{SERVICE.full_name}/{method}",
        request_serializer=type(message).SerializeToString,
        response_deserializer=SERVICE.response(method).FromString,
    )
    return stub(message, timeout=300)


@pytest.mark.parametrize("chat", CHATS[:3], ids=range(3))
def test_grpc_renders_what_http_renders(
    renderer: Renderer, channel: grpc.Channel, chat: dict[str, Any]
) -> None:
    fields = {k: [json.dumps(v) for v in chat[k]] for k in ("messages", "tools") if k in chat}
    if "chat_template_kwargs" in chat:
        fields["chat_template_kwargs"] = json.dumps(chat["chat_template_kwargs"])
    message = SERVICE.request("RenderChat")(
        **fields, sampling=json.dumps({"max_tokens": 7}), return_prompt_text=True
    )
    found = call(channel, "RenderChat", message)
    http = httpx.post(
        renderer.url + "/v1/chat/completions/render",
        json={**chat, "max_tokens": 7},
        verify=NO_TLS,
        timeout=300,
    ).json()
    assert list(found.token_ids) == http["token_ids"] and found.num_tokens == len(found.token_ids)
    assert json.loads(found.sampling_params)["max_tokens"] == 7
    assert "<|im_start|>" in found.prompt_text
    assert json.loads(found.parse_context) == http["parse_context"]


def test_grpc_tokenizes_there_and_back(channel: grpc.Channel) -> None:
    ids = call(channel, "Tokenize", SERVICE.request("Tokenize")(prompt="naïve 水")).token_ids
    text = call(channel, "Detokenize", SERVICE.request("Detokenize")(token_ids=ids)).text
    assert text == "naïve 水"
    both = SERVICE.request("RenderCompletion")(prompts=["a", "b c"])
    assert len(call(channel, "RenderCompletion", both).prompts) == 2
    assert call(channel, "HealthCheck", SERVICE.request("HealthCheck")()).status == "ok"


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("RenderChat", SERVICE.request("RenderChat")(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "RenderChat",
            SERVICE.request("RenderChat")(messages=["{"]),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "Detokenize",
            SERVICE.request("Detokenize")(token_ids=[10**8]),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "Tokenize",
            SERVICE.request("Tokenize")(prompt="x", model="other"),
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            "RenderChat",
            SERVICE.request("RenderChat")(
                messages=[json.dumps({"role": "user", "content": "x"})], chat_template="{{ 1 }}"
            ),
            grpc.StatusCode.PERMISSION_DENIED,
        ),
    ],
)
def test_grpc_refuses_with_the_code_that_says_why(
    channel: grpc.Channel, method: str, message: Any, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, message)
    assert caught.value.code() is code and caught.value.details()


def test_grpc_has_health_and_reflection(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(
        health_pb2.HealthCheckRequest(service=SERVICE.full_name), timeout=300
    ).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    told = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE.full_name in told.get_services()
    file = told.FindFileContainingSymbol("headrace.render.v1.RenderChatRequest")
    assert any(message.name == "Rendered" for message in file.message_type)


@pytest.mark.slow
def test_keys_guard_grpc_as_they_guard_http() -> None:
    command = [
        *(sys.executable, "-m", "headrace", "render", "--port", "0", "--grpc-port", "0"),
        *("--api-keys", "secret"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        try:
            with grpc.insecure_channel(address) as channel:
                stub = channel.unary_unary(
                    f"/{SERVICE.full_name}/Tokenize",
                    request_serializer=SERVICE.request("Tokenize").SerializeToString,
                    response_deserializer=SERVICE.response("Tokenize").FromString,
                )
                message = SERVICE.request("Tokenize")(prompt="x")
                for key, code in (("", "UNAUTHENTICATED"), ("Bearer wrong", "UNAUTHENTICATED")):
                    metadata = [("authorization", key)] if key else []
                    with pytest.raises(grpc.RpcError) as caught:
                        stub(message, metadata=metadata, timeout=300)
                    assert caught.value.code().name == code
                found = stub(message, metadata=[("authorization", "Bearer secret")], timeout=300)
                assert found.token_ids
        finally:
            process.terminate()


@pytest.mark.parametrize("chat", CHATS[:4], ids=range(4))
def test_the_text_and_the_spans_of_tokens_are_told_where_they_are_asked_for(
    renderer: Renderer, chat: dict[str, Any]
) -> None:
    """Contract 10: spans are of code points; a token's own text lies in its span."""
    path = renderer.url + "/v1/chat/completions/render"
    told = {"return_prompt_text": True, "return_token_offsets": True}
    plain = httpx.post(path, json=chat, verify=NO_TLS, timeout=300).json()
    made = httpx.post(path, json={**chat, **told}, verify=NO_TLS, timeout=300).json()
    assert made["token_ids"] == plain["token_ids"] and "prompt_text" not in plain
    text, spans = made["prompt_text"], made["token_offsets"]
    asked = {"tokens": made["token_ids"]}
    assert (
        httpx.post(renderer.url + "/detokenize", json=asked, verify=NO_TLS, timeout=300).json()[
            "prompt"
        ]
        == text
    )
    assert len(spans) == len(made["token_ids"]) and spans[0][0] == 0 and spans[-1][1] == len(text)
    assert all(begin <= end for begin, end in spans)
    assert all(after[0] in (before[1], before[1] - 1) for before, after in pairwise(spans))
    refused = httpx.post(path, json={**chat, "return_mm_kwargs": True}, verify=NO_TLS, timeout=300)
    assert refused.status_code == 400 and "return_mm_kwargs" in refused.text


def test_a_character_of_several_tokens_lies_in_the_span_of_each(renderer: Renderer) -> None:
    prompt = "naïve 水😀 end"
    body = {"prompt": prompt, "return_prompt_text": True, "return_token_offsets": True}
    (made,) = httpx.post(
        renderer.url + "/v1/completions/render", json=body, verify=NO_TLS, timeout=300
    ).json()
    text, spans = made["prompt_text"], made["token_offsets"]
    assert text.endswith(prompt)
    for token_id, (begin, end) in zip(made["token_ids"], spans, strict=True):
        asked = {"tokens": [token_id]}
        alone = httpx.post(
            renderer.url + "/detokenize", json=asked, verify=NO_TLS, timeout=300
        ).json()["prompt"]
        if "\ufffd" not in alone:
            assert text[begin:end] == alone
        else:
            assert text[begin:end] and not text[begin:end].isascii()


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_a_rendered_chat_can_be_answered_as_a_chat_at_once(
    bundled: Served, chat: dict[str, Any], stream: bool
) -> None:
    """render -> generate with output_mode derender is the direct call (contract 10)."""
    chat = {**chat, "temperature": 0, "max_tokens": 24}
    direct = post(bundled, "/v1/chat/completions", chat)
    made = post(bundled, "/v1/chat/completions/render", chat)
    body = {**made, "output_mode": "derender", "stream": stream}
    if not stream:
        answer = post(bundled, "/inference/v1/generate", body)
        assert [_comparable(c) for c in answer["choices"]] == [
            _comparable(c) for c in direct["choices"]
        ]
        assert answer["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
        return
    lines = bundled.post("/inference/v1/generate", body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    said: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said.setdefault(choice["index"], "")
        said[choice["index"]] += choice["delta"].get("content") or ""
    assert said == {c["index"]: c["message"].get("content") or "" for c in direct["choices"]}


def _comparable(choice: dict[str, Any]) -> Any:
    message = dict(choice["message"])
    calls = [call[call["type"]] for call in message.pop("tool_calls", None) or []]
    return choice["finish_reason"], message, calls, choice["logprobs"]
