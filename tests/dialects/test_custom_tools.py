"""Custom tools in chat: free text in, free text out (contract 1), with the official client and the bundled model."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

TOOL: Any = {
    "type": "custom",
    "custom": {"name": "run_code", "description": "Runs code", "format": {"type": "text"}},
}
ASKED: Any = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Run this: print(1)"}],
    "tools": [TOOL],
    "tool_choice": {"type": "custom", "custom": {"name": "run_code"}},
}


def test_a_call_holds_the_text_alone_streamed_and_whole(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(**ASKED).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "run_code" and call.id
    assert not call.custom.input.startswith('{"input"') and whole.finish_reason == "tool_calls"
    text, kinds = "", []
    for chunk in gpt.chat.completions.create(stream=True, **ASKED):
        for part in chunk.choices[0].delta.tool_calls or []:
            custom: Any = part.model_dump()["custom"]
            text += custom.get("input") or ""
            kinds.append(part.type)
    assert text == call.custom.input and kinds == ["custom", None]


def test_its_result_goes_back_and_other_tools_stay_functions(gpt: openai.OpenAI) -> None:
    function = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}  # fmt: skip
    call = {"id": "c1", "type": "custom", "custom": {"name": "run_code", "input": 'print("1")\n'}}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "run_code"}}]}
    asked = {**ASKED, "tools": [TOOL, function], "messages": history}
    free = gpt.chat.completions.create(**{**asked, "tool_choice": "none"})
    assert free.choices[0].message.content
    narrow = {"type": "allowed_tools", "allowed_tools": allowed}
    made = gpt.chat.completions.create(**{**asked, "tool_choice": narrow}).choices[0].message
    assert {call.type for call in made.tool_calls or []} == {"custom"}


@pytest.mark.parametrize(
    ("tool", "field"),
    [({"type": "custom", "custom": {}}, "tools[0].custom.name"), ({"type": "custom"}, "tools[0].type")],
)  # fmt: skip
def test_one_without_a_name_is_refused(gpt: openai.OpenAI, tool: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(**{**ASKED, "tools": [tool], "tool_choice": "auto"})
    assert caught.value.param == field


@pytest.mark.parametrize("choice", [ASKED["tool_choice"], "auto"], ids=["forced", "offered"])
def test_a_regular_expression_of_the_input_is_held_to(gpt: openai.OpenAI, choice: Any) -> None:
    """Contract 1: the format was told to the model in words, and its input was whatever came."""
    asked: Any = {
        **ASKED,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [_with_regex(r'[a-z]{2,5} "\d{3}"')],
        "tool_choice": choice,
    }
    (call,) = gpt.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert re.fullmatch(r'[a-z]{2,5} "\d{3}"', call.custom.input), call.custom.input
    with pytest.raises(openai.BadRequestError, match="unclosed group") as caught:
        gpt.chat.completions.create(**{**asked, "tools": [_with_regex("(")]})
    assert caught.value.param == "tools"


def _with_regex(definition: str) -> Any:
    grammar = {"syntax": "regex", "definition": definition}
    form = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {**TOOL["custom"], "format": form}}
