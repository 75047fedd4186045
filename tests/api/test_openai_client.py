"""The official client against a real process tree: what contract 0 to 2 promise it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.serving import NO_TLS, Served

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.object == "model"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_chat_answers_with_usage_that_adds_up(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, seed=1)
    (choice,) = answer.choices
    usage = answer.usage
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert usage is not None and usage.completion_tokens == 12
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.prompt_tokens_details is not None
    assert answer.id.startswith("chatcmpl-") and answer._request_id


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_folds_to_the_plain_answer(client: openai.OpenAI, n: int) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 7, "n": n}
    plain = client.chat.completions.create(**asked)
    texts, reasons, roles, usages = [""] * n, [""] * n, [0] * n, []
    shared = set()
    for chunk in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        shared.add((chunk.id, chunk.created, chunk.model, chunk.object))
        if chunk.usage is not None:
            assert chunk.choices == []
            usages.append(chunk.usage)
        for choice in chunk.choices:
            assert not reasons[choice.index], "nothing may follow a finish reason"
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role is not None
            reasons[choice.index] = choice.finish_reason or ""
    assert len(shared) == 1 and roles == [1] * n
    assert texts == [choice.message.content for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]
    assert len(usages) == 1 and plain.usage is not None
    assert usages[0].completion_tokens == plain.usage.completion_tokens == 40 * n
    assert usages[0].prompt_tokens == plain.usage.prompt_tokens


def test_events_of_a_stream_come_in_the_order_of_the_contract(server: Served) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=asked, verify=NO_TLS, timeout=300
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] == response.headers["request-id"]
        events = response.read().decode().split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_logprobs_carry_bytes_and_alternatives(client: openai.OpenAI) -> None:
    asked: Any = {
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "seed": 3},
        **{"logprobs": True, "top_logprobs": 2, "extra_body": {"skip_special_tokens": False}},
    }
    plain = client.chat.completions.create(**asked).choices[0]
    assert plain.logprobs is not None and plain.logprobs.content is not None
    assert len(plain.logprobs.content) == 5
    whole = b"".join(bytes(entry.bytes or []) for entry in plain.logprobs.content)
    assert whole.decode(errors="replace") == plain.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in plain.logprobs.content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == plain.logprobs.content


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, stream=True, stream_options=options
        )
        if chunk.usage is not None
    ]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_are_indexed_by_prompt_then_sample(
    client: openai.OpenAI, stream: bool
) -> None:
    asked: Any = {"model": "tiny", "prompt": ["fox", "wheel"], "n": 2, "max_tokens": 3, "seed": 5}
    texts = [""] * 4
    answer: Any = client.completions.create(**asked, echo=True, stream=stream)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert [text[:3] for text in texts] == ["fox", "fox", "whe", "whe"]
    assert texts[0] != texts[1]


def test_echo_with_logprobs_scores_the_prompt_for_scoring_clients(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="the lazy dog", max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    scores = choice.logprobs
    assert choice.text == "the lazy dog" and scores is not None
    assert "".join(scores.tokens or []) == "the lazy dog"
    assert scores.token_logprobs is not None and scores.token_logprobs[0] is None
    assert all(value is not None for value in scores.token_logprobs[1:])
    assert scores.top_logprobs is not None and scores.top_logprobs[0] is None
    assert scores.text_offset is not None and scores.tokens is not None
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_streamed_completion_logprobs_equal_the_plain_ones(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "mill", "max_tokens": 12, "logprobs": 1, "seed": 11}
    plain = client.completions.create(**asked).choices[0].logprobs
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(**asked, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    assert plain is not None
    assert [i for part in parts for i in part.text_offset or []] == plain.text_offset
    assert [token for part in parts for token in part.tokens or []] == plain.tokens


TOOLS = [{"type": "function", "function": {"name": "a"}}]


def _named(name: str) -> dict[str, Any]:
    """A tool whose forced call would be no JSON: it came out as text, with finish_reason stop."""
    return {"tools": [{"type": "function", "function": {"name": name}}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"temperature": 3}, "temperature", "got 3"),
        ({"temperature": "hot"}, "temperature", '"hot"'),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "at most 20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"max_tokens": -1}, "max_tokens", ">= 0"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens is 3"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"tools": []}, "tools", "length >= 1"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"tool_choice": "required", "tools": [{}]}, "tools[0].type", "function"),
        ({"stop": [""]}, "stop", ""),
        ({"seed": 2**63}, "seed", ""),
        ({"cache_salt": "a/b"}, "cache_salt", ""),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "1000000"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "reserved"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "robot"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "length <= 4"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "['1']: expected `float` <= 100.0; got 101"),
        ({"tool_choice": "none"}, "tool_choice", "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "text"),
        (_named('a"b'), "tools[0].function.name", "quotation"),
        (_named("a\\"), "tools[0].function.name", "backslashes"),
        (_named("a\nb"), "tools[0].function.name", "control characters"),
        ({"tools": [{"type": "shovel"}]}, "tools[0].type", "'shovel'"),
        ({"modalities": ["text", "audio"]}, "modalities", "audio"),
        ({"web_search_options": {}}, "web_search_options", "no web search"),
        ({"moderation": {"policy": "block"}}, "moderation", "cannot block"),
        ({"moderation": {"policy": {"output": "block"}}}, "moderation", "cannot block"),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort",
            "allowed: 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'; got \"huge\"",
        ),
        ({"verbosity": "loud"}, "verbosity", "loud"),
        ({"best_of": 2}, "best_of", "chat"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "reads arguments"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "vectors are parts of messages"),
        ({"stream_interval": 0}, "stream_interval", ">= 1"),
        ({"request_id": "a b"}, "request_id", '"a b"'),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "-1 means all"),
        (
            {"logit_bias": {"1": 1, "7": "x"}},
            "logit_bias",
            "logit_bias['7']: expected `float`, got `str`; got \"x\"",
        ),
        ({"functions": []}, "functions", "length >= 1"),
        ({"functions": [{"description": "x"}]}, "functions[0].name", "text"),
        ({"function_call": "auto"}, "function_call", "only together with functions"),
        (
            {"functions": [{"name": "a"}], "function_call": {"name": "b"}},
            "function_call",
            "no tool 'b'",
        ),
        ({"functions": [{"name": "a"}], "tools": TOOLS}, "functions", "one kind"),
        (
            {"messages": [{"role": "function", "content": "x"}]},
            "messages[0].name",
            "name of the function",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "function_call": {"name": "a"}}]},
            "messages[0].function_call",
            "assistant",
        ),
        ({"return_token_offsets": True, "stream": True}, "return_token_offsets", "streamed"),
        ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params", "go together"),
        (
            {"kv_transfer_params": {"do_remote_decode": True}},
            "kv_transfer_params",
            "--kv-transfer-path",
        ),
        (
            {"kv_transfer_params": {"do_remote_decode": True}, "n": 2},
            "kv_transfer_params",
            "one answer",
        ),
        ({"kv_retention": [{"priority": 101}]}, "kv_retention[0].priority", "100"),
        ({"kv_retention": [{"priority": 1}]}, "kv_retention", "--kv-retention"),
        ({"routing_key": "x"}, "routing_key", "--policy routing-key"),
        ({"ec_transfer_params": {"remote_host": "x"}}, "ec_transfer_params", "not accepted"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "takes no images"),
        ({"media_io_kwargs": {"video": {"num_frames": 9}}}, "media_io_kwargs", "may not"),
        ({"logits_processors": ["os.system"]}, "logits_processors", "may not name code"),
        ({"repetition_detection": {"max": 3}}, "repetition_detection", "unknown field"),
        (
            {"repetition_detection": {"max_pattern_size": 1025, "min_count": 2}},
            "repetition_detection.max_pattern_size",
            "0 to 1024",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 9, "min_count": 1}},
            "repetition_detection.min_count",
            "2 to 65536",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}},
            "repetition_detection.min_pattern_size",
            "0 to 2",
        ),
        ({"watermarking": {"key": 1}}, "watermarking", "not supported"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p", "beam search"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "0 or 1"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue", "excludes"),
    ],
)
def test_a_bad_field_is_named_with_value_and_limit(
    client: openai.OpenAI, change: dict[str, Any], field: str, said: str
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=httpx.Response)
    error = caught.value
    assert error.type == "invalid_request_error"
    assert error.param is not None and error.param.startswith(field)
    assert field in error.message
    assert any(part in error.message for part in said.split("|"))
    assert error.response.headers["x-should-retry"] == "false"


def test_a_prompt_longer_than_the_model_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[1] * 2049)
    assert caught.value.code == "context_length_exceeded"
    assert "2049" in caught.value.message
    assert "maximum context length is 2048 tokens" in caught.value.message, "litellm looks for it"


def test_an_unknown_model_is_not_found_and_lists_the_known_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and "tiny" in caught.value.message


def test_a_model_that_is_not_named_is_the_one_served(server: Served) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json()
    assert answer["model"] == "tiny"


def test_a_bad_token_id_is_named_by_the_field_it_came_in(server: Served) -> None:
    refused = server.post("/v1/completions", {"prompt": [10**6]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_a_wrong_method_is_told_the_right_ones(server: Served) -> None:
    refused = server.get("/v1/completions")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "extra",
    [
        *({"metadata": {"a": "b"}}, {"prompt_cache_key": "k"}, {"store": True}, {"user": "u"}),
        *(
            {"safety_identifier": "s"},
            {"prompt_cache_options": {"mode": "x"}},
            {"verbosity": "low"},
        ),
        *({"prediction": {"type": "content", "content": "x"}}, {"modalities": ["text"]}),
        *(
            {"prompt_cache_retention": "24h"},
            {"client_metadata": {}},
            {"reasoning_effort": "xhigh"},
        ),
        *({"moderation": {"policy": "report"}}, {"stop": ["a", "b", "c", "d"]}, {"stop": []}),
        *({"stop": None, "n": None, "tools": None, "tool_choice": None, "stream": None},),
        *({"use_beam_search": True, "n": 2}, {"kv_transfer_params": None}),
    ],
)
def test_what_clients_send_and_we_do_not_need_is_taken(
    server: Served, extra: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **extra}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text


def test_the_service_tier_is_echoed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, service_tier="auto"
    )
    assert answer.service_tier == "auto"


def test_the_extensions_reach_the_answer(server: Served) -> None:
    body = {
        **{"prompt": "mill", "max_tokens": 4, "return_token_ids": True, "logprobs": 0},
        **{"return_tokens_as_token_ids": True, "prompt_logprobs": 1, "truncate_prompt_tokens": 1},
    }
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert len(choice["token_ids"]) == 4 and len(choice["prompt_token_ids"]) == 1
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["prompt_logprobs"] == [None]


def test_tokens_come_back_as_the_text_they_were(server: Served) -> None:
    text = "größe 水車 <|end|>"
    made = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    refused = server.post("/detokenize", {"tokens": [10**6]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


def test_messages_are_tokenized_as_chat_would(server: Served) -> None:
    made = server.post("/tokenize", {"messages": MESSAGES}).json()
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == made["count"]


def test_one_hundred_requests_with_one_client_id_do_not_touch_each_other(server: Served) -> None:
    async def one(client: httpx.AsyncClient, i: int) -> tuple[str, str, str]:
        body = {"prompt": "fox", "max_tokens": 5, "seed": i, "temperature": 1}
        response = await client.post("/v1/completions", json=body, headers={"x-request-id": "same"})
        assert response.headers["x-client-request-id"] == "same"
        return response.headers["x-request-id"], response.json()["choices"][0]["text"], str(i)

    async def many() -> list[tuple[str, str, str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=NO_TLS) as client:
            return list(await asyncio.gather(*(one(client, i % 10) for i in range(100))))

    answers = asyncio.run(many())
    assert len({ident for ident, _, _ in answers}) == 100
    assert len({(text, seed) for _, text, seed in answers}) == 10


def test_the_ledger_is_at_rest_when_nothing_runs(server: Served) -> None:
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert server.at_rest()
    ledger = server.ledger()
    assert ledger["process"]["generations"] == 0


def test_metrics_move_by_what_was_served(server: Served) -> None:
    def figure(name: str) -> float:
        lines = server.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = figure("headrace_generation_tokens_total")
    server.post("/v1/completions", {"prompt": "fox", "max_tokens": 6})
    assert figure("headrace_generation_tokens_total") - before == 6
    assert figure("headrace_engine_total_blocks") > 0


def test_the_deep_probe_runs_a_token_through_the_whole_engine(server: Served) -> None:
    """Reliability 1.5."""
    answer = server.get("/health/generate")
    assert (answer.status_code, answer.json()) == (200, {"status": "generated"})


def test_series_do_not_grow_with_what_clients_ask_for(server: Served) -> None:
    """P20; 100,000 of them: tests/base/telemetry."""

    def names() -> set[str]:
        lines = server.get("/metrics").text.splitlines()
        return {line.split(" ")[0] for line in lines if not line.startswith("#")}

    with httpx.Client(base_url=server.url, verify=NO_TLS, timeout=300) as client:
        client.request("PURGE", "/x0")
        client.get("/x0")
        before = names()
        for i in range(50):
            client.request("PURGE" if i % 2 else "GET", f"/x{i}")
    assert names() == before
