"""Cohere's chat with the official client, over real sockets, against the bundled model (API-19)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import cohere
import pytest

from tests.api.serving import Served
from tests.dialects import agent
from tests.dialects.conftest import KEY

ADD: Any = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: Any = [{"type": "function", "function": f} for f in agent.functions()]


@pytest.fixture(scope="module")
def client(bundled: Served) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(api_key=KEY, base_url=bundled.url) as client:
        yield client


def ask(client: cohere.ClientV2, messages: Any = ADD, **more: Any) -> cohere.V2ChatResponse:
    return client.chat(model="demo", messages=messages, **{"temperature": 0, **more})


def test_an_answer_has_what_the_type_requires(client: cohere.ClientV2) -> None:
    answer = ask(client)
    assert answer.id and answer.finish_reason == "COMPLETE" and answer.message.role == "assistant"
    assert answer.message.content is not None and answer.message.tool_calls is None
    (part,) = answer.message.content
    assert part.type == "text" and "42" in part.text
    assert answer.usage is not None and answer.usage.tokens is not None
    assert answer.usage.tokens.input_tokens > 5 and answer.usage.tokens.output_tokens > 0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "COMPLETE"),
        ({"thinking": {"type": "enabled"}, "max_tokens": 2000}, "COMPLETE"),
        ({"messages": WEATHER, "tools": TOOLS}, "TOOL_CALL"),
        ({"max_tokens": 1}, "MAX_TOKENS"),
        ({"stop_sequences": ["2"]}, "STOP_SEQUENCE"),
        ({"logprobs": True}, "COMPLETE"),
    ],
    ids=["plain", "thinking", "tools", "cut", "stop", "logprobs"],
)
def test_a_stream_folds_to_the_full_answer(
    client: cohere.ClientV2, asked: dict[str, Any], reason: str
) -> None:
    full = ask(client, **asked)
    call: Any = {"messages": ADD, "temperature": 0, **asked}
    content: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    logprobs: list[float] = []
    events = list(client.chat_stream(model="demo", **call))
    assert events[0].type == "message-start" and events[-1].type == "message-end"
    for event in events[1:-1]:
        delta: Any = getattr(event, "delta", None)
        match event.type:
            case "content-start":
                assert event.index == len(content)
                content.append(delta.message.content.model_dump(exclude_none=True))
            case "content-delta":
                kind = content[event.index]["type"]
                content[event.index][kind] += getattr(delta.message.content, kind)
                logprobs += event.logprobs.logprobs if event.logprobs else []
            case "tool-call-start":
                assert event.index == len(calls)
                calls.append(delta.message.tool_calls.model_dump())
            case "tool-call-delta":
                arguments = delta.message.tool_calls.function.arguments
                calls[event.index]["function"]["arguments"] += arguments
    end: Any = events[-1]
    assert full.finish_reason == end.delta.finish_reason == reason
    assert content == [part.model_dump() for part in full.message.content or []]
    whole = [call.model_dump() for call in full.message.tool_calls or []]
    assert [c["function"] for c in calls] == [c["function"] for c in whole]
    assert end.delta.usage.tokens == full.usage.tokens
    if asked.get("logprobs"):
        assert full.logprobs and logprobs
        assert logprobs == [value for item in full.logprobs for value in item.logprobs or []]


def test_an_agent_answers_with_what_its_tool_said(client: cohere.ClientV2) -> None:
    first = ask(client, WEATHER, tools=TOOLS, tool_choice="REQUIRED", strict_tools=True)
    (call,) = first.message.tool_calls or []
    assert call.function is not None and call.function.name == "get_weather"
    result = agent.carry_out("get_weather", json.loads(call.function.arguments or ""))
    part = {"type": "document", "document": {"data": json.loads(result)}}
    said = {"role": "assistant", "tool_calls": [call.model_dump()], "tool_plan": "I look it up."}
    answered = {"role": "tool", "tool_call_id": call.id, "content": [part]}
    second = ask(client, [*WEATHER, said, answered], tools=TOOLS)
    assert second.finish_reason == "COMPLETE" and second.message.content
    assert str(json.loads(result)["temperature"]) in second.message.content[0].text


def test_a_schema_is_held(client: cohere.ClientV2) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    answer = ask(client, response_format={"type": "json_object", "json_schema": schema})
    assert answer.message.content and json.loads(answer.message.content[0].text) == {"n": 7}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"k": 501}, "k: expected `int` <= 500; got 501"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"citation_options": {"mode": "FAST"}}, "citation_options.mode"),
        ({"documents": ["Paris is in France."]}, "documents"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "audio"}]}]},
            "messages[0].content[0].type",
        ),
        ({"model": "other"}, "other"),
    ],
)
def test_what_is_wrong_is_named(
    client: cohere.ClientV2, asked: dict[str, Any], message: str
) -> None:
    call: Any = {"model": "demo", "messages": ADD, **asked}
    with pytest.raises((cohere.BadRequestError, cohere.NotFoundError)) as raised:
        client.chat(**call)
    body: Any = raised.value.body
    assert message in body["message"] and body["id"].startswith("req-")
