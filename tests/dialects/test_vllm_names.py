"""What vLLM's users see where vLLM contradicts OpenAI, and the options of the server that its users know: the
official client and raw HTTP against the bundled model (API-22)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from headrace.base import errors
from headrace.front.server.http.error_names import ERROR_NAMES, names_of
from headrace.front.server.http.protocol import HeaderTimeout
from headrace.front.server.openai.realtime_events import EmptyAudioBuffer, ModelNotChosen
from headrace.front.server.responses.websocket import TooManyLanes
from headrace.launch.locate import bundled_model
from tests.api.clients import openai_client
from tests.api.serving import NO_TLS, Served, eventually, serving
from tests.dialects import agent

KEY = "vllm-key"
ADD: Any = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
OPTIONS = (
    *("--compat", "vllm", "--api-keys", KEY, "--served-model-name", "demo", "--root-path", "/llm"),
    *("--force-include-usage", "--max-logprobs", "-1", "--return-tokens-as-token-ids"),
    *("--per-request-metrics", "--tokenizer-info"),
)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cache = tmp_path_factory.mktemp("cache")
    with serving(None, *OPTIONS, HEADRACE_CACHE_DIR=str(cache)) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="module")
def client(vllm: Served) -> Iterator[openai.OpenAI]:
    with openai_client(vllm.url, KEY) as client:
        yield client


def raw(served: Served, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}", **more.pop("headers", {})}
    url = served.url + path
    return httpx.request(method, url, headers=headers, verify=NO_TLS, timeout=300, **more)


def test_every_error_class_has_names_and_every_name_a_class() -> None:
    known = errors._all_errors(errors.HeadraceError)
    elsewhere = (HeaderTimeout, TooManyLanes, EmptyAudioBuffer, ModelNotChosen)
    assert {kind.__name__ for kind in elsewhere} <= set(ERROR_NAMES) <= set(known)
    for kind in known.values():
        assert names_of(kind).type and names_of(kind).vllm_type


@pytest.mark.parametrize(
    ("path", "body", "status", "openai_names", "vllm_type"),
    [
        ("/v1/chat/completions", {"model": "demo", "messages": ADD, "temperature": 9}, 400,
         ("invalid_request_error", None), "BadRequestError"),
        ("/v1/chat/completions", {"model": "nobody", "messages": ADD}, 404,
         ("not_found_error", "model_not_found"), "NotFoundError"),
        ("/v1/completions", {"model": "demo", "prompt": "word " * 9000}, 400,
         ("invalid_request_error", "context_length_exceeded"), "BadRequestError"),
        ("/v1/nothing", {}, 404, ("not_found_error", None), "NotFoundError"),
        ("/v1/responses", {"model": "demo", "input": "a", "previous_response_id": "resp_no"}, 400,
         ("invalid_request_error", "previous_response_not_found"), "BadRequestError"),
    ],
    ids=["value", "model", "length", "route", "response"],
)  # fmt: skip
def test_errors_have_the_names_of_the_server_that_is_asked_for(
    bundled: Served,
    vllm: Served,
    path: str,
    body: Any,
    status: int,
    openai_names: tuple[str, str | None],
    vllm_type: str,
) -> None:
    from tests.dialects.conftest import KEY as BUNDLED_KEY

    theirs = raw(
        bundled, "POST", path, json=body, headers={"authorization": f"Bearer {BUNDLED_KEY}"}
    )
    error = theirs.json()["error"]
    assert (theirs.status_code, error["type"], error["code"]) == (status, *openai_names)
    ours = raw(vllm, "POST", path, json=body)
    assert (ours.status_code, ours.json()["error"]["type"]) == (status, vllm_type)
    assert (
        ours.json()["error"]["code"] == status
        and ours.json()["error"]["message"] == error["message"]
    )


def test_a_missing_key_is_told_as_vllm_does(vllm: Served) -> None:
    answer = httpx.get(vllm.url + "/v1/models", verify=NO_TLS, timeout=300)
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})


def test_the_openai_client_reads_vllms_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=ADD, temperature=9)
    assert caught.value.type == "BadRequestError" and caught.value.param == "temperature"


def test_the_id_a_client_sent_comes_back_as_a_label(bundled: Served, vllm: Served) -> None:
    sent = {"x-request-id": "mine-1"}
    answer = raw(vllm, "GET", "/v1/models", headers=sent)
    assert answer.headers["x-request-id"] == "mine-1" != answer.headers["request-id"]
    invalid = raw(vllm, "GET", "/v1/models", headers={"x-request-id": "a b\x7f"})
    assert invalid.headers["x-request-id"] == invalid.headers["request-id"]
    assert bundled.get("/health", **sent).headers["x-request-id"] != "mine-1"


def finishes(client: openai.OpenAI, **more: Any) -> list[tuple[Any, str | None]]:
    call: Any = {"messages": ADD, "temperature": 0, **more}
    stream = client.chat.completions.create(model="demo", stream=True, **call)
    return [(c.choices[0].delta, c.choices[0].finish_reason) for c in stream if c.choices]


def test_the_last_text_of_a_stream_has_the_reason_it_ended(
    client: openai.OpenAI, gpt: openai.OpenAI
) -> None:
    cut = finishes(client, max_tokens=2)
    assert cut[-1][0].content and cut[-1][1] == "length"
    assert [reason for _, reason in cut[:-1]] == [None] * (len(cut) - 1)
    apart = finishes(gpt, max_tokens=2)
    assert apart[-1][0].content is None and apart[-1][1] == "length"
    assert "".join(d.content or "" for d, _ in cut) == "".join(d.content or "" for d, _ in apart)
    tools: Any = [{"type": "function", "function": f} for f in agent.functions()]
    called = finishes(client, messages=WEATHER, tools=tools)
    assert called[-1][1] == "tool_calls" and [r for _, r in called].count("tool_calls") == 1


def test_the_last_text_of_a_completion_has_the_reason_it_ended(client: openai.OpenAI) -> None:
    ask: Any = {"model": "demo", "prompt": ["one two", "three"], "max_tokens": 3, "temperature": 0}
    whole = client.completions.create(**ask)
    texts = ["", ""]
    reasons: list[list[str | None]] = [[], []]
    for chunk in client.completions.create(stream=True, **ask):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        assert reasons[choice.index][-1] == choice.finish_reason
        assert not any(reasons[choice.index][:-1])  # none, where all came at once


def test_streams_have_their_usage_where_the_server_says_so(
    client: openai.OpenAI, gpt: openai.OpenAI
) -> None:
    def usages(asked: openai.OpenAI) -> list[Any]:
        call: Any = {"model": "demo", "messages": ADD, "max_tokens": 3}
        chats = asked.chat.completions.create(stream=True, **call)
        texts = asked.completions.create(model="demo", prompt="a", max_tokens=3, stream=True)
        return [[c.usage for c in stream if c.usage] for stream in (chats, texts)]

    assert [len(found) for found in usages(client)] == [1, 1]
    assert usages(gpt) == [[], []]


def test_more_log_probabilities_where_the_server_allows_them(
    client: openai.OpenAI, gpt: openai.OpenAI
) -> None:
    ask: Any = {"model": "demo", "messages": ADD, "logprobs": True, "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match=r"21 given, at most 20 allowed"):
        gpt.chat.completions.create(top_logprobs=21, **ask)
    with pytest.raises(openai.BadRequestError, match=r"at most 20 allowed"):
        gpt.completions.create(model="demo", prompt="a", logprobs=21)
    found = client.chat.completions.create(top_logprobs=40, **ask).choices[0].logprobs
    assert found is not None and found.content is not None
    assert len(found.content[0].top_logprobs) == 40
    assert all(t.token.startswith("token_id:") for t in found.content[0].top_logprobs)
    named = (
        client.chat.completions.create(**ask, extra_body={"return_tokens_as_token_ids": False})
        .choices[0]
        .logprobs
    )
    assert named is not None and named.content is not None
    assert not named.content[0].token.startswith("token_id:")
    scored = client.completions.create(model="demo", prompt="a", logprobs=30, max_tokens=1)
    found_scores = scored.choices[0].logprobs
    assert found_scores is not None and found_scores.top_logprobs is not None
    assert len(found_scores.top_logprobs[0]) >= 30


def test_all_log_probabilities_where_the_server_sets_no_bound(
    vllm: Served, client: openai.OpenAI, gpt: openai.OpenAI
) -> None:
    ask: Any = {"model": "demo", "messages": ADD, "logprobs": True, "max_tokens": 1}
    found = client.chat.completions.create(top_logprobs=-1, **ask).choices[0].logprobs
    assert found is not None and found.content is not None
    width = len(found.content[0].top_logprobs)
    assert width > 1000
    more: Any = {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt_logprobs": -1}
    echoed = raw(vllm, "POST", "/v1/completions", json={"model": "demo", "prompt": "a b", **more})
    scores = echoed.json()["choices"][0]["prompt_logprobs"]
    assert [len(position) >= width for position in scores[1:]] == [True] * (len(scores) - 1)
    with pytest.raises(openai.BadRequestError, match=r"-1 given, at most 20 allowed"):
        gpt.chat.completions.create(top_logprobs=-1, **ask)


def test_a_proxys_prefix_may_stand_before_every_path(vllm: Served) -> None:
    with openai_client(vllm.url + "/llm", KEY) as below:
        assert below.models.list().data[0].id == "demo"
    assert raw(vllm, "GET", "/v1/models").status_code == 200
    assert raw(vllm, "GET", "/llmv1/models").status_code == 404
    assert raw(vllm, "GET", "/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert httpx.get(vllm.url + "/llm/v1/models", verify=NO_TLS, timeout=300).status_code == 401


def answer(client: openai.OpenAI, **more: Any) -> Any:
    call: Any = {"model": "demo", "messages": ADD, "temperature": 0, "max_tokens": 8, **more}
    return client.chat.completions.create(**call)


def test_extension_fields_are_null_where_they_say_nothing(gpt: openai.OpenAI) -> None:
    chat = answer(gpt).model_dump()
    assert {
        chat[name] for name in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params")
    } == {None}
    assert chat["choices"][0]["token_ids"] is None and "metrics" not in chat
    text = gpt.completions.create(model="demo", prompt="a", max_tokens=2).model_dump()
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason"):
        assert text["choices"][0][name] is None
    told = answer(gpt, extra_body={"return_token_ids": True, "prompt_logprobs": 0}).model_dump()
    assert told["prompt_token_ids"] and told["prompt_logprobs"] and told["choices"][0]["token_ids"]


@pytest.mark.parametrize("server", ["bundled", "vllm"])
def test_ids_asked_for_replace_the_likeliest(server: str, request: pytest.FixtureRequest) -> None:
    asked = request.getfixturevalue("client" if server == "vllm" else "gpt")
    more: Any = {"logprob_token_ids": [5, 7], "return_tokens_as_token_ids": True}
    chat = answer(asked, logprobs=True, top_logprobs=3, max_tokens=1, extra_body=more)
    entry = chat.choices[0].logprobs.content[0]
    shown = [t.token for t in entry.top_logprobs]
    named = ["token_id:5", "token_id:7"]
    assert shown == (([entry.token, *named]) if server == "vllm" else named)


def test_the_sampled_token_leads_its_alternatives_for_vllms_users(
    client: openai.OpenAI, gpt: openai.OpenAI
) -> None:
    bias: Any = {"logit_bias": {"300": 100}, "logprobs": True, "top_logprobs": 3, "max_tokens": 1}
    ids: Any = {"return_tokens_as_token_ids": True}
    theirs = answer(client, **bias, extra_body=ids).choices[0].logprobs.content[0]
    ours = answer(gpt, **bias, extra_body=ids).choices[0].logprobs.content[0]
    assert theirs.token == ours.token == "token_id:300"
    likeliest = [t.token for t in ours.top_logprobs]
    assert "token_id:300" not in likeliest and len(likeliest) == 3
    assert [t.token for t in theirs.top_logprobs] == ["token_id:300", *likeliest[:2]]
    body: Any = {
        "model": "demo",
        "prompt": "a",
        "max_tokens": 1,
        "logprobs": 2,
        "logit_bias": {"300": 100},
    }
    texts = [
        c.completions.create(**body, extra_body=ids).choices[0].logprobs for c in (client, gpt)
    ]
    orders = [list(t.model_dump()["top_logprobs"][0]) for t in texts if t is not None]
    assert orders[0] == [orders[1][-1], *orders[1][:-1]] and orders[0][0] == "token_id:300"


def test_echo_repeats_the_message_that_goes_on(gpt: openai.OpenAI) -> None:
    begun: Any = [*ADD, {"role": "assistant", "content": "17 + 25 ="}]
    more: Any = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    whole = answer(gpt, messages=begun, extra_body=more).choices[0].message.content
    assert whole.startswith("17 + 25 =") and "42" in whole
    chunks = answer(gpt, messages=begun, extra_body=more, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert not answer(gpt, extra_body={"echo": True}).choices[0].message.content.startswith("What")


def test_other_roles_reach_the_template_for_vllms_users(
    client: openai.OpenAI, gpt: openai.OpenAI
) -> None:
    messages: Any = [{"role": "narrator", "content": "It rains."}, *ADD]
    assert answer(client, messages=messages).choices[0].message.role == "assistant"
    with pytest.raises(openai.BadRequestError, match="narrator"):
        answer(gpt, messages=messages)
    for role in ("<|im_start|>", "a b", "", 7):
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].role"):
            answer(client, messages=[{"role": role, "content": "It rains."}])


def test_a_request_is_told_where_its_time_went(client: openai.OpenAI) -> None:
    whole = answer(client, max_tokens=4)
    metrics, gaps = whole.metrics, whole.usage.completion_tokens - 1
    assert set(metrics) == {
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
        "tokens_per_second",
    }
    assert metrics["time_to_first_token_ms"] > 0 and metrics["tokens_per_second"] > 0
    assert metrics["generation_time_ms"] == pytest.approx(gaps * metrics["mean_itl_ms"], abs=0.01)
    last = list(answer(client, stream=True))[-1]
    assert last.usage and last.metrics["time_to_first_token_ms"] > 0
    assert "metrics" not in answer(client, n=2).model_dump()
    ask: Any = {"model": "demo", "max_tokens": 2}
    one: Any = client.completions.create(prompt="a", **ask)
    assert one.metrics["queue_time_ms"] >= 0
    assert "metrics" not in client.completions.create(prompt=["a", "b"], **ask).model_dump()


def test_the_load_stands_in_a_header_where_it_is_asked_for(bundled: Served) -> None:
    header = "endpoint-load-metrics"
    loads: dict[str, str] = {}

    def answered(form: str) -> bool:
        # an engine that says nothing for some seconds leaves the header out
        response = bundled.get("/health", **{f"{header}-format": form})
        loads[form] = response.headers.get(header, "")
        return header in response.headers

    for form in ("text", "JSON"):
        eventually(lambda form=form: answered(form), within_s=20)
    assert loads["text"].startswith("TEXT named_metrics.kv_cache_usage_perc=")
    named = json.loads(loads["JSON"].removeprefix("JSON "))["named_metrics"]
    assert 0 <= named["kv_cache_usage_perc"] <= 1 and named["num_requests_waiting"] == 0
    for headers in ({}, {f"{header}-format": "xml"}):
        assert header not in bundled.get("/health", **headers).headers


def test_tokens_are_told_as_they_stand_in_the_vocabulary(vllm: Served) -> None:
    found = raw(
        vllm, "POST", "/tokenize", json={"prompt": "one two", "return_token_strs": True}
    ).json()
    tokenizer = tokenizers.Tokenizer.from_file(str(bundled_model() / "tokenizer.json"))
    config = json.loads((bundled_model() / "tokenizer_config.json").read_text())
    assert found["token_strs"] == [tokenizer.id_to_token(i) for i in found["tokens"]]
    info = raw(vllm, "GET", "/tokenizer_info").json()
    assert info["tokenizer_class"] == config["tokenizer_class"] and info["chat_template"]
    assert info["eos_token"] == config["eos_token"]


def test_preemptions_of_requests_are_counted(vllm: Served, client: openai.OpenAI) -> None:
    answer(client, max_tokens=1)
    lines = raw(vllm, "GET", "/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("headrace_request_preemptions_count")]
    assert sum(float(line.split()[-1]) for line in counts) > 0
