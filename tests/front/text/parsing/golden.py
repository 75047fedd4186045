"""What models of each family write, and what it means."""

# ruff: noqa: E501 - a golden text reads best in one line

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.front.text.parsing.families import reasoning_family, tool_family
from headrace.front.text.parsing.parser import OutputParser
from headrace.front.text.parsing.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
    joined,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "s": {"type": "string"},
        "a": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "any": {},
    },
    "g": {},
}


@dataclass(frozen=True)
class Golden:
    """A text of a family and its meaning."""

    tools: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    inside: bool = False
    think: str = "qwen3"


def parser_of(tools: str, think: str = "qwen3", **more: Any) -> OutputParser:
    def ids() -> Iterator[str]:
        yield from (f"call_{i}" for i in range(10**9))

    made = ids()
    family, reasoning = tool_family(tools), reasoning_family(think)
    return OutputParser(
        reasoning=None if reasoning is None else reasoning.tags,
        tools=None if family is None else family.grammar,
        **{"schemas": SCHEMAS, **more},
        new_id=lambda: next(made),
    )


def parse(parser: OutputParser, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


def meaning(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]], int]:
    """Content, reasoning, calls as (name, arguments as text), complete calls."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert part.index == len(calls) - 1, "never back to an earlier call"
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    content = "".join(p.text for p in parts if isinstance(p, Content))
    reasoning = "".join(p.text for p in parts if isinstance(p, Reasoning))
    return content, reasoning, calls, sum(isinstance(p, CallEnd) for p in parts)


def _hermes(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _coder(name: str, **arguments: str) -> str:
    listed = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{listed}</function>\n</tool_call>"


HARD = 'a "quote" \\ </tool_call> {[ \n\t é 水'
GOLDEN = [
    Golden("none", "Plain <tool_call> text.\n", content="Plain <tool_call> text.\n"),
    Golden("hermes", " \n Hello  world \n", content=" \n Hello  world \n"),
    Golden("hermes", _hermes("f", {"s": HARD}), calls=[("f", {"s": HARD})]),
    Golden(
        "hermes",
        "<think>\nFirst\n\nthen\n</think>\n\nSure.\n" + _hermes("f", {"a": 1}) + "\n" + _hermes("g", {}),
        content="Sure.", reasoning="First\n\nthen", calls=[("f", {"a": 1}), ("g", {})],
    ),
    Golden("hermes", "so\n</think>\n\nyes", content="yes", reasoning="so", inside=True),
    Golden("hermes", "a <think> b", content="a <think> b"),
    Golden("hermes", "<think>\n\n</think>\n\nyes", content="yes"),
    Golden("hermes", "<think>never closed\n", reasoning="never closed\n"),
    Golden("hermes", "<think>a <think> b</think>c", reasoning="a <think> b", content="c"),
    Golden("hermes", "first</think>then", reasoning="first", content="then", think="deepseek_r1", inside=True),
    Golden("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', calls=[("f", {"a": [1, {}]})]),
    Golden("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', calls=[("f", {"a": 1})]),
    Golden("hermes", '<tool_call>{"name": "f", "arguments": null, "id": 3}', calls=[("f", {})]),
    Golden("hermes", '<tool_call>{"name": "g"}</tool_call> tail ', calls=[("g", {})], content="tail "),
    Golden("hermes", "x <tool_call> no call </tool_call>", content="x <tool_call> no call </tool_call>"),
    Golden("hermes", '<tool_call>{"name": "f"', content='<tool_call>{"name": "f"'),
    Golden("hermes", '<tool_call>{"nome": 1}</tool_call>', content='<tool_call>{"nome": 1}</tool_call>'),
    Golden("jamba", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_calls>', calls=[("f", {"a": 1}), ("g", {})]),
    Golden("qwen3_coder", "Go.\n" + _coder("f", s="one\n\ntwo", a="3", b="True", o='{"k": [1]}'),
           content="Go.", calls=[("f", {"s": "one\n\ntwo", "a": 3, "b": True, "o": {"k": [1]}})]),
    Golden("qwen3_coder", _coder("f", s='say "<b>"\\', o="__import__('os').system('id')", any="[1, 2]", new="7"),
           calls=[("f", {"s": 'say "<b>"\\', "o": "__import__('os').system('id')", "any": [1, 2], "new": "7"})]),
    Golden("qwen3_coder", _coder("g") + "\n" + _coder("f", s=""), calls=[("g", {}), ("f", {"s": ""})]),
    Golden("qwen3_coder", "<tool_call>no function</tool_call>", content="<tool_call>no function</tool_call>"),
    Golden("seed_oss", _coder("f", a="3").replace("tool_call", "seed:tool_call"), calls=[("f", {"a": 3})], think="none"),
    Golden("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x y</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
           calls=[("f", {"s": "x y"}), ("g", {})]),
    Golden("glm45", "<think>hm</think>\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
           reasoning="hm", calls=[("f", {"s": "x", "a": 5}), ("g", {})]),
    Golden("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', calls=[("f", {"a": 1}), ("g", {})], think="none"),
    Golden("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', calls=[("f", {"a": 1})], think="none"),
    Golden("llama3_json", '{"name": "Alice", "parameters": 1}', content='{"name": "Alice", "parameters": 1}', think="none"),
    Golden("llama3_json", "Hello {world}", content="Hello {world}", think="none"),
]  # fmt: skip
