"""Forced calls in every family's format: what the grammar lets through is read by the same family's parser as calls of
the tools, with arguments that their schemas allow."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from headrace.core.grammar.hook import GrammarHook
from headrace.front.text.parsing.engine import Part
from headrace.front.text.parsing.families import TOOL_FAMILIES, ToolFamily
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.parsing.xml_parameters import schemas_of
from headrace.front.text.structure.tools import required_calls, strict_calls
from tests.core.grammar.constrained import (
    BACKENDS,
    GrammarDriver,
    calls_in,
    constrained,
    shared_hook,
)
from tests.covering import first_of_each

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "pattern": "^[A-Za-z]{1,8}$"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "parameters": {
                "type": "object",
                "properties": {"now": {"type": "boolean"}},
                "required": ["now"],
                "additionalProperties": False,
            },
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


SYNTAXES = first_of_each(TOOL_FAMILIES, [type(family.grammar) for family in TOOL_FAMILIES])


@pytest.fixture(scope="module", params=BACKENDS)
def hook(request: pytest.FixtureRequest) -> GrammarHook:
    return shared_hook(request.param)


def calls_of(family: ToolFamily, text: str) -> tuple[list[tuple[str, Any]], str]:
    """The calls that the family's parser reads, and the content beside them."""
    answers = AnswerFormat(tools=family)
    parser = answers.parser(prompt_tail="<|start|>assistant", schemas=schemas_of(TOOLS))
    assert parser is not None
    parts: list[Part] = [*parser.push(text), *parser.finish()]
    return calls_in(parts)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", SYNTAXES, ids=lambda family: family.name)
def test_a_forced_call_is_read_as_a_call(hook: GrammarHook, family: ToolFamily) -> None:
    driver = GrammarDriver(hook=hook)
    node = required_calls(TOOLS, family.writing, at_most_one=True)
    ended = 0
    requests = [constrained(seed, node, max_tokens=300) for seed in range(1, 7)]
    for text, end in driver.run_all(requests):
        assert end.error is None, end.error
        if end.reason != "stop":
            continue  # a text without a bound, drawn at random
        ended += 1
        calls, content = calls_of(family, text)
        assert len(calls) == 1 and not content.strip(), text
        name, arguments = calls[0]
        schema = PARAMETERS[name]
        if family.writing.arguments != "json":  # bare texts: their patterns are not held
            arguments.pop("city", None)
        jsonschema.validate(arguments, schema)
    assert ended >= 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", SYNTAXES, ids=lambda family: family.name)
def test_several_calls_are_read_one_by_one(hook: GrammarHook, family: ToolFamily) -> None:
    driver = GrammarDriver(hook=hook)
    only = [TOOLS[1]]
    node = required_calls(only, family.writing, at_most_one=False)
    most = 0
    requests = [constrained(seed, node, max_tokens=300) for seed in range(1, 9)]
    for text, end in driver.run_all(requests):
        if end.reason == "stop":
            calls, content = calls_of(family, text)
            assert calls and all(name == "stop" for name, _ in calls), text
            assert not content.strip(), (content, text)
            most = max(most, len(calls))
    assert most >= 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", SYNTAXES, ids=lambda family: family.name)
def test_strict_tools_leave_text_free(hook: GrammarHook, family: ToolFamily) -> None:
    """It compiles, free text goes through, and a model is never held to call."""
    node = strict_calls(TOOLS, family.writing)
    if node is None:
        assert not (family.writing.begin + family.writing.call_begin).startswith("<")
        return
    driver = GrammarDriver(hook=hook)
    text, end = driver.run_one(constrained(1, node, max_tokens=30))
    assert end.error is None and text
