"""`functions` and `function_call`, the names that tools had before, through the official client (contract 1)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.serving import Served
from tests.dialects import agent
from tests.dialects.conftest import KEY

FUNCTIONS: Any = [
    {key: tool[key] for key in ("name", "description", "parameters")}
    for tool in agent.for_responses()
]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 200}
RESULT = json.dumps({"city": "Paris", "temperature": 18, "condition": "sunny"})


def test_a_call_and_its_result_are_those_of_a_tool(gpt: openai.OpenAI) -> None:
    old = gpt.chat.completions.create(messages=ASK, functions=FUNCTIONS, **GREEDY)
    new = gpt.chat.completions.create(
        messages=ASK, tools=TOOLS, parallel_tool_calls=False, **GREEDY
    )
    (choice,), (tool,) = old.choices, new.choices
    call, calls = choice.message.function_call, tool.message.tool_calls
    assert call is not None and calls is not None and choice.message.tool_calls is None
    assert (call.name, call.arguments) == (calls[0].function.name, calls[0].function.arguments)
    assert choice.finish_reason == "function_call" and tool.finish_reason == "tool_calls"
    assert old.usage is not None and new.usage is not None
    assert old.usage.prompt_tokens == new.usage.prompt_tokens
    said: Any = choice.message.model_dump(exclude_none=True)
    history = [*ASK, said, {"role": "function", "name": call.name, "content": RESULT}]
    answer = gpt.chat.completions.create(messages=history, functions=FUNCTIONS, **GREEDY)
    assert "18" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    tools = [
        *ASK,
        tool.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": RESULT},
    ]
    same = gpt.chat.completions.create(messages=tools, tools=TOOLS, **GREEDY)
    assert same.choices[0].message.content == answer.choices[0].message.content
    plain = gpt.chat.completions.create(messages=history, **GREEDY)
    assert plain.choices[0].finish_reason in ("stop", "length"), "without functions it is a history"


@pytest.mark.parametrize("choice", ["auto", {"name": "get_weather"}])
def test_the_stream_folds_to_the_answer(gpt: openai.OpenAI, choice: Any) -> None:
    asked = {"messages": ASK, "functions": FUNCTIONS, "function_call": choice, **GREEDY}
    whole = gpt.chat.completions.create(**asked).choices[0]
    with gpt.chat.completions.stream(**asked) as stream:
        folded = stream.get_final_completion().choices[0]
    assert folded.message.function_call == whole.message.function_call is not None
    assert folded.finish_reason == whole.finish_reason == "function_call"
    names = [
        call.name
        for chunk in gpt.chat.completions.create(stream=True, **asked)
        for c in chunk.choices
        if (call := c.delta.function_call) is not None
    ]
    assert [name for name in names if name is not None] == ["get_weather"], "the name comes once"


def test_none_offers_nothing(gpt: openai.OpenAI) -> None:
    asked: Any = {"messages": ASK, "functions": FUNCTIONS, "function_call": "none", **GREEDY}
    answer = gpt.chat.completions.create(**asked).choices[0]
    assert answer.message.function_call is None and answer.finish_reason != "function_call"


def test_errors_name_the_fields_as_they_were_sent(bundled: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    body = {"messages": ASK, "functions": [{"name": "a", "parameters": schema}]}
    forced = {**body, "function_call": {"name": "a"}}
    answer = httpx.post(
        bundled.url + "/v1/chat/completions", json=forced, headers={"x-api-key": KEY}, timeout=300
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "functions", error
    assert error["message"].startswith("functions:/properties/a/not")


def test_they_are_counted_and_rendered_as_tools(bundled: Served) -> None:
    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        key = {"x-api-key": KEY}
        return httpx.post(bundled.url + path, json=body, headers=key, timeout=300)

    counts = [
        post("/tokenize", {"messages": ASK, **offered}).json()["count"]
        for offered in ({"functions": FUNCTIONS}, {"tools": TOOLS}, {})
    ]
    assert counts[0] == counts[1] > counts[2]
    rendered = [
        post("/v1/chat/completions/render", {"messages": ASK, **offered}).json()
        for offered in ({"functions": FUNCTIONS}, {"tools": TOOLS})
    ]
    assert rendered[0]["token_ids"] == rendered[1]["token_ids"]
    both = {"messages": ASK, "functions": FUNCTIONS, "tools": TOOLS}
    refused = post("/v1/chat/completions/render", both)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "functions"


def test_a_custom_call_of_an_earlier_turn_needs_no_tools(gpt: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    history: Any = [
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]
    assert gpt.chat.completions.create(messages=history, **GREEDY).choices[0].finish_reason
    item: Any = [
        {"role": "user", "content": "List the files."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a.txt"},
    ]
    assert gpt.responses.create(model="demo", input=item, max_output_tokens=20).status
