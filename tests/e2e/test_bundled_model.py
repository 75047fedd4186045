"""The main job on real input: the real server, the bundled model, the official client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headrace.bench.held_out import AnswerCheck, EvalItem, read_items
from headrace.bench.scoring import FunctionCall, score, score_tool_calls
from tests.api.clients import openai_client


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai_client(base_url) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(client: openai.OpenAI, model: str, text: str, **more: object) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=200,
        **more,
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer.choices[0].message.content or ""


def test_a_question_gets_its_answer(client: openai.OpenAI, model: str) -> None:
    assert "42" in ask(client, model, "What is 17 + 25?")


def test_the_stream_is_the_full_answer(client: openai.OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello! Who are you?"}], temperature=0, stream=True,
        stream_options={"include_usage": True}, max_tokens=200,
    )  # fmt: skip
    text, usage = "", None
    for chunk in chunks:
        text += "".join(c.delta.content or "" for c in chunk.choices)
        usage = chunk.usage or usage
    assert text == ask(client, model, "Hello! Who are you?")
    assert usage is not None and usage.completion_tokens > 1


def test_a_repeated_conversation_reads_its_prefix_from_the_cache(
    client: openai.OpenAI, model: str
) -> None:
    messages = [{"role": "user", "content": "Remember these words: " + "blue river stone " * 30}]
    first, again = (
        client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
        for _ in range(2)
    )
    assert first.choices[0].message.content == again.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 64


def judged(item: EvalItem, message: dict[str, Any]) -> bool:
    """Whether a message as the API gives it is right: tool calls come parsed."""
    if item.check is not AnswerCheck.TOOL_CALL:
        return score(item, message["content"])
    return message["content"] is None and score_tool_calls(item, called(message["tool_calls"]))


def called(calls: list[dict[str, Any]]) -> list[FunctionCall]:
    functions = [call["function"] for call in calls]
    return [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]


@pytest.mark.parametrize(
    "task",
    [
        "arithmetic",
        pytest.param("copy", marks=pytest.mark.slow),
        pytest.param("tool_call", marks=pytest.mark.slow),
        pytest.param("recall", marks=pytest.mark.slow),
        pytest.param("json", marks=pytest.mark.slow),
    ],
)
def test_held_out_tasks_reach_the_bar(base_url: str, model: str, task: str) -> None:
    right, items = 0, read_items()[task][:20]
    for item in items:
        body = {
            "model": model, "messages": item.messages, "temperature": 0, "max_tokens": item.max_tokens,
            "chat_template_kwargs": item.template_kwargs,
        }  # fmt: skip
        if item.tools is not None:
            body["tools"] = item.tools
        request = urllib.request.Request(
            base_url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            right += judged(item, json.load(response)["choices"][0]["message"])
    assert right >= 19


def asked(model: str, item: EvalItem, **more: object) -> dict[str, Any]:
    return {
        **{"model": model, "messages": item.messages, "tools": item.tools, "temperature": 0},
        **{"max_tokens": item.max_tokens, "extra_body": {"chat_template_kwargs": item.template_kwargs}},
        **more,
    }  # fmt: skip


def streamed(client: openai.OpenAI, **request: Any) -> dict[str, Any]:
    """What a client that joins the deltas ends up with; checks their shape on the way (contract 1)."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(stream=True, stream_options=options, **request):
        found["usage"] = chunk.usage or found.get("usage")
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            found["reasoning"] += extra.get("reasoning") or ""
            found["reason"] = choice.finish_reason or found["reason"]
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(found["calls"]) and call.type == "function"
                    assert call.function.arguments == ""
                    found["calls"].append([call.function.name, ""])
                else:
                    assert call.index == len(found["calls"]) - 1 and call.function.name is None
                    found["calls"][-1][1] += call.function.arguments or ""
    return found


def counted(usage: Any) -> tuple[int, ...]:
    """The counts that do not depend on what the cache holds."""
    details = usage.completion_tokens_details
    return (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        details.reasoning_tokens,
    )


@pytest.mark.slow
def test_tool_calls_reach_the_bar_and_streams_are_the_full_answers(
    client: openai.OpenAI, model: str
) -> None:
    right, items = 0, read_items()["tool_call"][20:40]
    for item in items:
        full = client.chat.completions.create(**asked(model, item))
        (choice,) = full.choices
        calls = choice.message.tool_calls or []
        ids = [call.id for call in calls]
        assert len(set(ids)) == len(ids)
        pairs = [[call.function.name, call.function.arguments] for call in calls]
        stream = streamed(client, **asked(model, item))
        assert stream["calls"] == pairs and stream["reason"] == choice.finish_reason
        assert stream["content"] == (choice.message.content or "")
        assert counted(stream["usage"]) == counted(full.usage)
        parsed: list[FunctionCall] = [{"name": n, "arguments": json.loads(a)} for n, a in pairs]
        good = choice.finish_reason == "tool_calls" and choice.message.content is None
        right += good and score_tool_calls(item, parsed)
    assert right >= 19


def test_with_parallel_calls_off_only_the_first_one_comes(
    client: openai.OpenAI, model: str
) -> None:
    items = [i for i in read_items()["tool_call"] if len(i.expected) == 2]
    request = asked(model, items[0], parallel_tool_calls=False)
    full = client.chat.completions.create(**request)
    assert len(full.choices[0].message.tool_calls or []) == 1
    assert full.choices[0].finish_reason == "tool_calls"
    both = client.chat.completions.create(**asked(model, items[0]))
    assert len(both.choices[0].message.tool_calls or []) == 2
    assert len(streamed(client, **request)["calls"]) == 1


def test_tool_choice_none_offers_no_tools_and_parses_no_calls(
    client: openai.OpenAI, model: str
) -> None:
    item = read_items()["tool_call"][0]
    answer = client.chat.completions.create(**asked(model, item, tool_choice="none"))
    bare = client.chat.completions.create(**{**asked(model, item), "tools": openai.NOT_GIVEN})
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == bare.choices[0].message.content
    assert counted(answer.usage) == counted(bare.usage)


def test_reasoning_comes_apart_from_the_answer_and_is_counted(
    client: openai.OpenAI, model: str
) -> None:
    question: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    request: dict[str, Any] = {
        **{"model": model, "messages": question, "temperature": 0, "max_tokens": 200},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    full = client.chat.completions.create(**request)
    message, extra = full.choices[0].message, full.choices[0].message.model_extra or {}
    assert extra["reasoning"] and extra["reasoning"] == extra["reasoning_content"]
    assert "think" not in extra["reasoning"] and "think" not in (message.content or "")
    assert "42" in (message.content or "")
    assert full.usage is not None and full.usage.completion_tokens_details is not None
    thought = full.usage.completion_tokens_details.reasoning_tokens or 0
    assert 0 < thought < full.usage.completion_tokens
    stream = streamed(client, **request)
    assert (stream["reasoning"], stream["content"]) == (extra["reasoning"], message.content)
    assert counted(stream["usage"]) == counted(full.usage)
    cut = client.chat.completions.create(**{**request, "max_tokens": 3})
    assert cut.usage is not None and cut.usage.completion_tokens_details is not None
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.content == ""
    assert (cut.usage.completion_tokens_details.reasoning_tokens or 0) >= 1


def test_a_tool_result_is_answered(client: openai.OpenAI, model: str) -> None:
    item = read_items()["tool_call"][0]
    first = client.chat.completions.create(**asked(model, item)).choices[0].message
    assert first.tool_calls
    result: Any = {
        "role": "tool",
        "tool_call_id": first.tool_calls[0].id,
        "content": '{"ok": true}',
    }
    messages: Any = [*item.messages, first.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(**{**asked(model, item), "messages": messages})
    assert second.choices[0].finish_reason in ("stop", "tool_calls")


@pytest.mark.slow
def test_sampling_with_a_seed_repeats_and_without_varies(client: openai.OpenAI, model: str) -> None:
    def story(seed: int | None) -> str:
        """Hot and with every token allowed: no two of these are alike by chance."""
        answer = client.completions.create(
            model=model, prompt="Once upon a time", temperature=2.0, top_p=1.0, max_tokens=24,
            seed=seed, extra_body={"ignore_eos": True},
        )  # fmt: skip
        return answer.choices[0].text

    assert story(5) == story(5)
    assert len({story(None) for _ in range(6)}) > 1


def test_metrics_and_ledger_agree_that_nothing_runs(base_url: str) -> None:
    with urllib.request.urlopen(base_url + "/v1/requests") as response:
        ledger = json.load(response)["engines"][0]
    assert (ledger["running"], ledger["waiting"]) == (0, 0)
    with urllib.request.urlopen(base_url + "/metrics") as response:
        assert b"headrace_" in response.read()
