"""Every dialect has one shape: three pure functions, `to_conversation`, `to_chunks` and `to_answer`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from headrace.base.errors import InvalidRequest, ModelNotFound
from headrace.front.server.anthropic import conversation as messages
from headrace.front.server.anthropic import stream as messages_stream
from headrace.front.server.anthropic.schema import parse_messages
from headrace.front.server.conversation.context import ServedModel
from headrace.front.server.conversation.request import ChatRequest, parse
from headrace.front.server.conversation.resolved import AS_CHAT, Conversation
from headrace.front.server.openai import chat
from headrace.front.server.responses import conversation as responses
from headrace.front.server.responses import stream as responses_stream
from headrace.front.server.responses.items import with_ids
from headrace.front.server.responses.schema import parse_response
from headrace.front.server.responses.tools import offered

SERVED = ServedModel(
    names=("m",), generation_defaults={"temperature": 0.7}, max_n=4, max_model_len=100
)
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
BODIES: dict[str, dict[str, Any]] = {
    "openai": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 7,
        "tools": [{"type": "function", "function": TOOL}],
    },
    "anthropic": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL["parameters"]}],
    },
    "responses": {
        "input": "hi",
        "max_output_tokens": 7,
        "tools": [{"type": "function", **TOOL}],
    },
}


def conversation(dialect: str, **fields: Any) -> Conversation:
    """The body of the dialect with other fields, resolved."""
    body = {"model": "m", **BODIES[dialect], **fields}
    if dialect == "openai":
        return chat.to_conversation(parse(body, ChatRequest), SERVED, id="id-1")
    if dialect == "anthropic":
        request = parse_messages(body)
        return messages.to_conversation(request, SERVED, id="id-1", unseal=lambda text: None)
    sent = parse_response(body)
    translated = responses.to_request(
        sent,
        body,
        tools=offered(sent.tools),
        history=[],
        own_items=with_ids(sent.input, "id-1"),
        unseal=lambda text: None,
        max_model_len=SERVED.max_model_len,
    )
    return responses.to_conversation(translated, SERVED, id="id-1")


@pytest.mark.parametrize(
    ("request_side", "answer_side"),
    [(chat, chat), (messages, messages_stream), (responses, responses_stream)],
)
def test_a_dialect_has_three_functions_under_the_same_names(
    request_side: Any, answer_side: Any
) -> None:
    assert not inspect.iscoroutinefunction(request_side.to_conversation)
    assert list(inspect.signature(request_side.to_conversation).parameters)[1] == "served"
    assert inspect.isasyncgenfunction(answer_side.to_chunks)
    assert inspect.iscoroutinefunction(answer_side.to_answer)
    for function in (answer_side.to_chunks, answer_side.to_answer):
        assert next(iter(inspect.signature(function).parameters)) == "events"


@pytest.mark.parametrize("dialect", BODIES)
def test_one_request_in_each_dialect_is_one_conversation(dialect: str) -> None:
    resolved = conversation(dialect)
    assert (resolved.id, resolved.model) == ("id-1", "m")
    assert resolved.params.max_tokens == 7 and resolved.params.temperature == 0.7
    (message,) = resolved.prompt.messages
    content = message["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    assert message["role"] == "user" and text == "hi" and resolved.prompt.opens
    assert resolved.form.offered == resolved.prompt.tools
    assert resolved.prompt.tools is not None
    assert resolved.prompt.tools[0]["function"]["name"] == "f"
    assert resolved.form.forced is None and not resolved.fields.streams
    assert (resolved.sent is AS_CHAT) == (dialect == "openai")


@pytest.mark.parametrize("dialect", BODIES)
def test_a_conversation_is_frozen(dialect: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        conversation(dialect).id = "other"


@pytest.mark.parametrize("dialect", BODIES)
def test_what_cannot_be_served_is_refused_before_anything_is_rendered(dialect: str) -> None:
    with pytest.raises(ModelNotFound):
        conversation(dialect, model="other")
    field = {"openai": "tool_choice", "anthropic": "tool_choice", "responses": "tool_choice"}
    choice = {
        "openai": {"type": "function", "function": {"name": "g"}},
        "anthropic": {"type": "tool", "name": "g"},
        "responses": {"type": "function", "name": "g"},
    }
    with pytest.raises(InvalidRequest) as refused:
        conversation(dialect, tool_choice=choice[dialect])
    assert refused.value.field == field[dialect]
