"""Answers against the openai SDK's own types, strictly: what a type requires is there, and what it has no null for is
absent (API-22). Decisions that docs/SERVING.md states, and a search for tools that the client carries out."""

from __future__ import annotations

import io
import json
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import ConversationItem
from openai.types.responses import Response, ResponseItem
from pydantic import BaseModel, TypeAdapter

from tests.api.serving import Served
from tests.dialects import agent
from tests.dialects.conftest import KEY

ADD: Any = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER = "What is the weather in Paris?"
TOOLS: Any = [{"type": "function", **f} for f in agent.functions()]
CHAT_TOOLS: Any = [{"type": "function", "function": f} for f in agent.functions()]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": WEATHER},
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "Thanks."},
]


def get(served: Served, path: str) -> Any:
    answer = served.get(path, authorization=f"Bearer {KEY}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def strict(kind: Any, document: Any) -> None:
    """Every field that the type requires is there, with a value that it allows; a null only where it is allowed by
    the field's annotation and the field is required or has a documented null."""
    TypeAdapter(kind).validate_python(document)


def nulls(kind: type[BaseModel], document: dict[str, Any], allowed: set[str]) -> set[str]:
    """Fields of the type that are null and may not be."""
    return {n for n in kind.model_fields if n in document and document[n] is None} - allowed


def test_listed_input_items_have_what_their_types_require(
    gpt: openai.OpenAI, bundled: Served
) -> None:
    items: Any = ITEMS
    made = gpt.responses.create(model="demo", input=items, max_output_tokens=16)
    strict(Response, get(bundled, f"/v1/responses/{made.id}"))
    listed = get(bundled, f"/v1/responses/{made.id}/input_items?limit=100&order=asc")["data"]
    assert [item["type"] for item in listed] == [item.get("type", "message") for item in ITEMS]
    for item in listed:
        assert item["status"] == "completed", item
        strict(ResponseItem, item)


def test_items_of_conversations_have_a_status(gpt: openai.OpenAI, bundled: Served) -> None:
    items: Any = ITEMS
    talk = gpt.conversations.create(items=items)
    listed = get(bundled, f"/v1/conversations/{talk.id}/items?limit=100")["data"]
    assert len(listed) == len(ITEMS)
    for item in listed:
        assert item["status"] == "completed", item
        strict(ConversationItem, item)


def test_what_has_not_happened_to_files_and_batches_is_absent(
    gpt: openai.OpenAI, bundled: Served
) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "demo", "messages": ADD, "max_tokens": 2}
    data = io.BytesIO(json.dumps({**line, "body": body}).encode())
    file = gpt.files.create(file=("in.jsonl", data), purpose="batch")
    shown = get(bundled, f"/v1/files/{file.id}")
    strict(FileObject, shown)
    assert nulls(FileObject, shown, set()) == set() and "expires_at" not in shown
    batch = gpt.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    shown = get(bundled, f"/v1/batches/{batch.id}")
    strict(Batch, shown)
    assert nulls(Batch, shown, {"metadata"}) == set()
    assert "cancelled_at" not in shown and "errors" not in shown
    keeps: Any = {"anchor": "created_at", "seconds": 3600}
    kept = gpt.files.create(file=("in.jsonl", data), purpose="batch", expires_after=keeps)
    assert get(bundled, f"/v1/files/{kept.id}")["expires_at"] == kept.created_at + 3600


def chunks(gpt: openai.OpenAI, **more: Any) -> list[ChatCompletionChunk]:
    call: Any = {"model": "demo", "temperature": 0, **more}
    found = list(gpt.chat.completions.create(stream=True, **call))
    for chunk in found:
        strict(ChatCompletionChunk, chunk.model_dump())
    return found


def test_a_streamed_call_begins_without_content(gpt: openai.OpenAI) -> None:
    ask: Any = {"messages": [{"role": "user", "content": WEATHER}], "tools": CHAT_TOOLS}
    first, *others = chunks(gpt, **ask)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content is None
    assert all(c.choices[0].delta.content is None for c in others if c.choices)
    assert any(c.choices[0].delta.tool_calls for c in others if c.choices)
    text = chunks(gpt, messages=ADD, tools=CHAT_TOOLS)
    assert (text[0].choices[0].delta.role, text[0].choices[0].delta.content) == ("assistant", "")
    two = chunks(gpt, messages=ADD, tools=CHAT_TOOLS, n=2)
    roles = [c.choices[0].index for c in two if c.choices and c.choices[0].delta.role]
    assert sorted(roles) == [0, 1]
    whole = gpt.chat.completions.create(model="demo", temperature=0, **ask)
    strict(ChatCompletion, whole.model_dump())
    assert whole.choices[0].message.content is None


def test_a_result_without_its_call_is_rendered(gpt: openai.OpenAI) -> None:
    messages: Any = [*ADD, {"role": "tool", "tool_call_id": "gone", "content": "42"}]
    assert gpt.chat.completions.create(model="demo", messages=messages, max_tokens=4).choices
    items: Any = [{"role": "user", "content": "Add."}, {**ITEMS[3], "call_id": "gone"}]
    assert gpt.responses.create(model="demo", input=items, max_output_tokens=16).status


def test_two_tools_of_one_name_are_refused(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="twice"):
        gpt.chat.completions.create(model="demo", messages=ADD, tools=[*CHAT_TOOLS, CHAT_TOOLS[0]])
    with pytest.raises(openai.BadRequestError, match="twice"):
        gpt.responses.create(model="demo", input="a", tools=[*TOOLS, TOOLS[0]])


def test_names_that_vendors_refuse_are_taken(gpt: openai.OpenAI) -> None:
    name = "files.read all/" + "x" * 80
    function: Any = {**CHAT_TOOLS[0]["function"], "name": name}
    tools: Any = [{"type": "function", "function": function}]
    ask: Any = {"model": "demo", "messages": ADD, "tools": tools, "max_tokens": 4}
    chosen: Any = {"type": "function", "function": {"name": name}}
    assert gpt.chat.completions.create(**ask).choices[0].finish_reason
    assert gpt.chat.completions.create(**ask, tool_choice=chosen).choices[0].finish_reason


def test_no_output_tokens_compute_the_prompt_alone(gpt: openai.OpenAI) -> None:
    made = gpt.responses.create(model="demo", input="Hello.", max_output_tokens=0)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens" and made.output == []
    assert made.usage is not None and made.usage.output_tokens == 0


SEARCH: Any = {
    "type": "tool_search",
    "execution": "client",
    "description": "Search for tools by what they do. Call it for the weather.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
FOUND: Any = {
    "type": "namespace",
    "name": "mcp__world",
    "description": "Tools of an MCP server.",
    "tools": [{**TOOLS[0], "defer_loading": True}],
}


def prompt_of(gpt: openai.OpenAI, **asked: Any) -> str:
    rendered: Any = gpt.post("/responses/render", body={"model": "demo", **asked}, cast_to=object)
    text: Any = gpt.with_options(base_url=str(gpt.base_url).removesuffix("/v1/")).post(
        "/detokenize", body={"tokens": rendered["token_ids"]}, cast_to=object
    )
    prompt: str = text["prompt"]
    return prompt


def test_a_search_for_tools_is_a_call_of_the_clients(gpt: openai.OpenAI) -> None:
    ask: Any = {"model": "demo", "input": WEATHER, "tools": [SEARCH], "temperature": 0}
    assert SEARCH["description"] in prompt_of(gpt, input=WEATHER, tools=[SEARCH])
    made = gpt.responses.create(**ask, tool_choice="required")
    (call,) = made.output
    assert call.type == "tool_search_call" and call.execution == "client" and call.call_id
    assert isinstance(call.arguments, dict) and "query" in call.arguments
    events = list(gpt.responses.create(**ask, tool_choice="required", stream=True))
    done: Any = next(e for e in events if e.type == "response.output_item.done")
    assert done.item.type == "tool_search_call" and done.item.arguments == call.arguments
    assert not any(e.type.startswith("response.function_call") for e in events)
    for item in (call, done.item):
        strict(type(item), item.model_dump())


def test_tools_that_were_found_reach_the_model(gpt: openai.OpenAI) -> None:
    called: Any = {"type": "tool_search_call", "call_id": "s1", "execution": "client"}
    found: Any = {"type": "tool_search_output", "call_id": "s1", "execution": "client"}
    items: Any = [
        {"role": "user", "content": WEATHER},
        {**called, "arguments": {"query": "weather"}, "status": "completed"},
        {**found, "tools": [FOUND], "status": "completed"},
    ]
    name = f"mcp__world__{TOOLS[0]['name']}"
    prompt = prompt_of(gpt, input=items, tools=[SEARCH])
    assert prompt.count(TOOLS[0]["description"]) == 1 and name in prompt
    choice: Any = {"type": "function", "name": TOOLS[0]["name"], "namespace": "mcp__world"}
    made = gpt.responses.create(
        model="demo", input=items, tools=[SEARCH], tool_choice=choice, temperature=0
    )
    (call,) = made.output
    assert call.type == "function_call" and (call.namespace, call.name) == (
        "mcp__world",
        TOOLS[0]["name"],
    )
    after: Any = [{"role": "user", "content": "And in Rome?"}]
    further = gpt.responses.create(
        model="demo", input=after, previous_response_id=made.id, tools=[SEARCH], tool_choice=choice
    )
    assert further.output[0].type == "function_call", "what an earlier turn found stays offered"
    listed = gpt.responses.input_items.list(made.id).data
    assert {item.type for item in listed} >= {"tool_search_call", "tool_search_output"}
    for item in listed:
        strict(ResponseItem, item.model_dump(exclude_unset=True))


def test_tools_added_later_and_those_of_hosted_searches_are_offered(gpt: openai.OpenAI) -> None:
    added: Any = {"type": "additional_tools", "role": "developer", "tools": [FOUND]}
    items: Any = [added, {"role": "user", "content": WEATHER}]
    assert f"mcp__world__{TOOLS[0]['name']}" in prompt_of(gpt, input=items)
    hosted: Any = [{"type": "tool_search"}, {**TOOLS[0], "defer_loading": True}]
    assert TOOLS[0]["description"] in prompt_of(gpt, input=WEATHER, tools=hosted)


def test_items_that_bring_no_list_of_tools_are_refused(gpt: openai.OpenAI) -> None:
    items: Any = [{"type": "tool_search_output", "call_id": "s1", "tools": "x"}]
    with pytest.raises(openai.BadRequestError, match=r"tools"):
        gpt.responses.create(model="demo", input=items)
