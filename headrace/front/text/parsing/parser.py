"""One answer's parser: reasoning first, then content and tool calls, put together from the chosen
families."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.front.text.parsing.blocks import Blocks, BlockTags
from headrace.front.text.parsing.call_syntax import CallSyntax, SyntaxCalls
from headrace.front.text.parsing.engine import Content, Engine, Part, Plain, Sink, State
from headrace.front.text.parsing.families import (
    BareTags,
    ReasoningFamily,
    ToolFamily,
    ToolGrammar,
    reasoning_family,
    tool_family,
)
from headrace.front.text.parsing.harmony import Harmony, HarmonyTags
from headrace.front.text.parsing.marks import Marking
from headrace.front.text.parsing.messages import Messages
from headrace.front.text.parsing.named_json import NamedJson, NamedTags
from headrace.front.text.parsing.nested_tags import NestedCalls, NestedTags
from headrace.front.text.parsing.reader import CallReader
from headrace.front.text.parsing.reasoning import ReasoningState, ReasoningTags
from headrace.front.text.parsing.tagged_json import BareJson, JsonTags, TaggedJson
from headrace.front.text.parsing.xml_parameters import ParameterTags, Schemas, XmlParameters
from headrace.front.text.tokenizer import Tokenizer, decode_pieces

_TAIL_TOKENS = 64
"""Enough of a prompt to see which tag or header it ends with."""
_LETTERS = string.ascii_letters + string.digits
Span = tuple[int, int | None]


def call_id() -> str:
    """A fresh id of a tool call."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """A fresh id of nine letters and digits, the only kind some templates take."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the served model writes; None: not parsed. `pieces` and `all_pieces` (the latter with
    control tokens) turn tokens into the text that the parsers read; None: the tokenizer's own
    do."""

    reasoning: ReasoningFamily | None = None
    tools: ToolFamily | None = None
    pieces: Mapping[int, str | bytes] | None = None
    all_pieces: Mapping[int, str | bytes] | None = None

    @staticmethod
    def named(*, tool_parser: str, reasoning_parser: str) -> AnswerFormat:
        """The format of two resolved options."""
        return AnswerFormat(
            reasoning=reasoning_family(reasoning_parser), tools=tool_family(tool_parser)
        )

    def bound(self, tokenizer: Tokenizer) -> AnswerFormat:
        """The format for one vocabulary: its control tokens are structure only as tokens
        (marks.py)."""
        marking = Marking(tokenizer)
        replace = msgspec.structs.replace
        reasoning, tools = self.reasoning, self.tools
        if reasoning is not None:
            reasoning = replace(reasoning, tags=marking.struct(reasoning.tags))
        if tools is not None:
            tools = replace(tools, grammar=marking.struct(tools.grammar))
            tools = replace(tools, writing=marking.known(tools.writing))
        if not marking.structural:
            return self
        return AnswerFormat(
            reasoning=reasoning,
            tools=tools,
            pieces=marking.pieces(skip_special_tokens=True),
            all_pieces=marking.pieces(skip_special_tokens=False),
        )

    def pieces_of(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> Mapping[int, str | bytes]:
        """What each token adds to the text that a parser of this format reads."""
        own = self.pieces if skip_special_tokens else self.all_pieces
        if own is not None:  # a table that is not filled yet is empty
            return own
        return tokenizer.pieces_without_special if skip_special_tokens else tokenizer.pieces

    def prompt_tail(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
        """How a prompt ends, as `parser` wants it."""
        pieces = self.pieces_of(tokenizer, skip_special_tokens=False)
        return decode_pieces([pieces[i] for i in prompt_ids[-_TAIL_TOKENS:]])

    def parser(
        self,
        *,
        prompt_tail: str,
        unfinished: str | None = None,
        schemas: Schemas | None,
        only_one_call: bool = False,
    ) -> OutputParser | None:
        """A parser for one answer; None where the text is the content. `unfinished`: the text of
        the message that is continued, if one is; `schemas`: the tools on offer, None if there are
        none."""
        if self.reasoning is None and (self.tools is None or schemas is None):
            return None
        tags = None if self.reasoning is None else self.reasoning.tags
        short = self.tools is not None and self.tools.ids == "short"
        return OutputParser(
            reasoning=tags,
            inside=tags is not None and tags.begins_inside(prompt_tail, unfinished=unfinished),
            tools=None if self.tools is None else self.tools.grammar,
            schemas=schemas,
            only_one_call=only_one_call,
            prompt_tail=prompt_tail,
            marked=self.pieces is not None,
            new_id=short_call_id if short else call_id,
        )


@dataclass(kw_only=True, eq=False)
class OutputParser:
    """Parses one answer. `schemas` None: no tools are offered, so nothing is a call."""

    reasoning: ReasoningTags | None = None
    inside: bool = False
    tools: ToolGrammar | None = None
    schemas: Schemas | None = None
    only_one_call: bool = False
    prompt_tail: str = ""
    marked: bool = False
    new_id: Callable[[], str] = call_id
    _reasoning: ReasoningState | Messages | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        reasoning, tools = self.reasoning, self.tools
        self._sink = Sink(self.new_id, only_one_call=self.only_one_call, marked=self.marked)
        self._engine = Engine(self._sink)
        if messages := self._messages(reasoning, tools):
            self._reasoning = messages
            self._engine.become(messages)
            return
        if reasoning is not None and reasoning.until and self.schemas is None:
            reasoning = msgspec.structs.replace(reasoning, until=())
        frame = () if reasoning is None else reasoning.frame
        tools = None if self.schemas is None else tools
        state = _grammar_state(self._sink, tools, self.schemas or {}, frame)
        if reasoning is not None and reasoning.kept:
            if self.inside:
                self._sink.add(Content(reasoning.open))
        elif reasoning is not None:
            self._reasoning = ReasoningState(self._engine, reasoning, state, inside=self.inside)
        self._engine.become(self._reasoning or state)

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        return self._engine.push(text)

    def finish(self) -> list[Part]:
        """The parts that the end of the answer completes."""
        return self._engine.finish()

    def _messages(
        self, reasoning: ReasoningTags | None, tools: ToolGrammar | None
    ) -> Messages | None:
        """The state for a row of messages, if that is the format; tools of another one are not
        looked for in it."""
        thinks = None if reasoning is None else reasoning.messages
        tags = tools if isinstance(tools, HarmonyTags | BlockTags) else thinks
        if tags is None:
            return None
        offered = None if tags is not tools else self.schemas
        tail, reasons = self.prompt_tail, thinks is not None
        match tags:
            case HarmonyTags():
                return Harmony(
                    self._engine, tags, functions=offered, reasons=reasons, prompt_tail=tail
                )
            case BlockTags():
                calls = offered is not None
                return Blocks(self._engine, tags, calls=calls, reasons=reasons, prompt_tail=tail)

    @property
    def called(self) -> bool:
        """Whether there are calls, and all that have begun are complete."""
        return 0 < self._sink.num_calls == self._sink.num_complete

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
    def reasoning_spans(self) -> Sequence[Span]:
        """Where reasoning stands in the text, in characters; the end of the last is None while it
        is open."""
        return () if self._reasoning is None else self._reasoning.spans


def _grammar_state(
    sink: Sink, grammar: ToolGrammar | None, schemas: Schemas, frame: Sequence[str]
) -> State:
    if grammar is None:
        return CallReader(sink, [], frame) if frame else Plain(sink)
    match grammar:
        case JsonTags():
            return TaggedJson(sink, grammar, frame)
        case BareTags():
            return BareJson(sink, grammar.keys, names=frozenset(schemas), prefix=grammar.prefix)
        case ParameterTags():
            return XmlParameters(sink, grammar, schemas, frame)
        case NestedTags():
            return NestedCalls(sink, grammar, schemas, frame)
        case NamedTags():
            return NamedJson(sink, grammar, frame)
        case CallSyntax():
            return SyntaxCalls(sink, grammar, schemas, frame)
        case _:
            return CallReader(sink, [], frame) if frame else Plain(sink)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters of tools in OpenAI's shape; what is malformed counts as a tool without
    parameters."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas
