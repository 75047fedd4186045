"""One answer's parser: reasoning first, then content and tool calls, put together from the chosen families."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.front.text.parsing.engine import Engine, Plain, State
from headrace.front.text.parsing.families import (
    BareTags,
    ReasoningFamily,
    ToolFamily,
    ToolGrammar,
    reasoning_family,
    tool_family,
)
from headrace.front.text.parsing.parts import Part, Sink
from headrace.front.text.parsing.reasoning import ReasoningState, ReasoningTags
from headrace.front.text.parsing.tagged_json import BareJson, JsonTags, TaggedJson
from headrace.front.text.parsing.xml_parameters import Schemas, XmlParameters


def call_id() -> str:
    """A fresh id of a tool call."""
    return "call_" + secrets.token_hex(12)


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the served model writes; None: not parsed."""

    reasoning: ReasoningFamily | None = None
    tools: ToolFamily | None = None

    @staticmethod
    def named(*, tool_parser: str, reasoning_parser: str) -> AnswerFormat:
        """The format of two resolved options."""
        return AnswerFormat(
            reasoning=reasoning_family(reasoning_parser), tools=tool_family(tool_parser)
        )


class OutputParser:
    """Parses one answer. `schemas` None: no tools are offered, so nothing is a call."""

    def __init__(
        self,
        *,
        reasoning: ReasoningTags | None = None,
        inside: bool = False,
        tools: ToolGrammar | None = None,
        schemas: Schemas | None = None,
        only_one_call: bool = False,
        new_id: Callable[[], str] = call_id,
    ) -> None:
        self._sink = Sink(new_id, only_one_call=only_one_call)
        self._engine = Engine(self._sink)
        state: State = Plain(self._sink)
        if tools is not None and schemas is not None:
            state = _grammar_state(self._sink, tools, schemas)
        self._reasoning = None
        if reasoning is not None:
            self._reasoning = ReasoningState(self._engine, reasoning, state, inside=inside)
        self._engine.become(self._reasoning or state)

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        return self._engine.push(text)

    def finish(self) -> list[Part]:
        """The parts that the end of the answer completes."""
        return self._engine.finish()

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._sink.num_calls

    @property
    def closed(self) -> bool:
        """Whether nothing further will be said: the one call that was asked for is complete."""
        return self._sink.closed

    @property
    def reasoning_over(self) -> bool:
        """Whether no more reasoning can come."""
        return self._reasoning is None or self._reasoning.over

    @property
    def consumed(self) -> int:
        """Characters whose meaning is settled."""
        return self._engine.consumed

    @property
    def reasoning_span(self) -> tuple[int, int | None] | None:
        """Where the reasoning stands in the text, in characters; the end is None while it is open."""
        return None if self._reasoning is None else self._reasoning.span


def _grammar_state(sink: Sink, grammar: ToolGrammar, schemas: Schemas) -> State:
    if isinstance(grammar, JsonTags):
        return TaggedJson(sink, grammar)
    if isinstance(grammar, BareTags):
        return BareJson(sink, grammar.keys, names=frozenset(schemas), prefix=grammar.prefix)
    return XmlParameters(sink, grammar, schemas)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters of tools in OpenAI's shape; what is malformed counts as a tool without parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found
