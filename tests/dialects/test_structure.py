"""Forced tools, schemas and thinking budgets through both dialects: the same constraint that chat uses (API-12)."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.api.clients import anthropic
from tests.api.serving import Served
from tests.dialects import agent

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = "Anna is 31 years old. Give me her name and age as JSON."
GREEDY: Any = {"temperature": 0}


def follows(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "age"} and isinstance(found["age"], int)


def test_a_schema_shapes_the_text_of_a_message(claude: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked: Any = {
        "model": "demo",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": ASK}],
        "output_config": config,
        "extra_body": GREEDY,
    }
    (block,) = claude.messages.create(**asked).content
    assert block.type == "text"
    follows(block.text)
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_text() == block.text


def test_a_schema_shapes_the_text_of_a_response(gpt: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}}
    answer = gpt.responses.create(
        model="demo", input=ASK, text=text, temperature=0, max_output_tokens=300
    )
    follows(answer.output_text)
    assert answer.text is not None and answer.text.format is not None
    plain: Any = {"format": {"type": "json_object"}}
    answer = gpt.responses.create(
        model="demo", input=ASK, text=plain, temperature=0, max_output_tokens=200
    )
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)


def test_a_schema_waits_for_the_end_of_the_thinking(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = claude.messages.create(
        model="demo",
        max_tokens=2000,
        messages=[{"role": "user", "content": ASK}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config=config,
        extra_body=GREEDY,
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    last = message.content[-1]
    assert last.type == "text"
    follows(last.text)


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_tool_is_called_when_one_must_be(claude: anthropic.Anthropic, kind: str) -> None:
    choice: Any = {"type": kind, "disable_parallel_tool_use": True}
    if kind == "tool":
        choice["name"] = "get_time"
    message = claude.messages.create(
        model="demo",
        max_tokens=300,
        messages=[{"role": "user", "content": "Hello! Who are you?"}],
        tools=agent.for_messages(),
        tool_choice=choice,
        extra_body=GREEDY,
    )
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert kind == "any" or call.name == "get_time"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}])
def test_a_function_is_called_when_one_must_be(gpt: openai.OpenAI, choice: Any) -> None:
    answer = gpt.responses.create(
        model="demo",
        input="Hello! Who are you?",
        tools=agent.for_responses(),
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=300,
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert choice == "required" or call.name == "get_time"
    assert isinstance(json.loads(call.arguments), dict)


def test_no_tool_is_called_when_none_may_be(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
) -> None:
    weather = "What is the weather in Paris?"
    message = claude.messages.create(
        model="demo",
        max_tokens=60,
        messages=[{"role": "user", "content": weather}],
        tools=agent.for_messages(),
        tool_choice={"type": "none"},
        extra_body=GREEDY,
    )
    assert all(block.type == "text" for block in message.content)
    answer = gpt.responses.create(
        model="demo",
        input=weather,
        tools=agent.for_responses(),
        tool_choice="none",
        temperature=0,
        max_output_tokens=60,
    )
    assert all(item.type == "message" for item in answer.output)


def reasoned(served: Served) -> float:
    name = "headrace_reasoning_tokens_total "
    lines = served.get("/metrics").text.splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_thinking_ends_within_its_budget(gpt: openai.OpenAI, bundled: Served) -> None:
    """Its tokens are counted, of this answer and of all (API-03, OBS-04)."""
    before = reasoned(bundled)
    asked: Any = {"model": "demo", "input": "What is 17 + 25?", "temperature": 0}
    answer = gpt.responses.create(
        **asked, reasoning={"effort": "low"}, extra_body={"thinking_token_budget": 8}
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens <= 8 + 4
    assert reasoned(bundled) - before == answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.output[-1].type == "message" and answer.output_text


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ({"format": {"type": "json_schema", "name": "p"}}, "text.format"),
        ({"format": {"type": "json_schema", "name": "p", "schema": {"type": "nonsense"}}}, "text.format"),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_refused_under_its_own_name(
    gpt: openai.OpenAI, text: Any, field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="demo", input="x", text=text)
    assert caught.value.param is not None and caught.value.param.startswith(field)
