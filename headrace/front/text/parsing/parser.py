"""One answer's parser: reasoning first, then content and tool calls, put together from the chosen
families.

Reasoning is what stands between an opening and a closing tag. The prompt may have opened the tag
already (its template does, or an unfinished message is continued). Only the beginning of the answer
can open it, so that text about the tags stays text; the first closing tag ends it. Line breaks that
templates put around the tags belong to the tags.
"""

from __future__ import annotations

import codecs
import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.front.text.parsing.blocks import Blocks, BlockTags
from headrace.front.text.parsing.call_syntax import CallSyntax, SyntaxCalls
from headrace.front.text.parsing.engine import (
    Content,
    Engine,
    Part,
    Plain,
    Reasoning,
    Sink,
    State,
    Tags,
    literal,
    only,
    skip_space,
    unmarked,
)
from headrace.front.text.parsing.families import (
    BareTags,
    ReasoningFamily,
    ToolFamily,
    ToolGrammar,
    reasoning_family,
    tool_family,
)
from headrace.front.text.parsing.families_reasoning import ReasoningTags
from headrace.front.text.parsing.harmony import Harmony, HarmonyTags
from headrace.front.text.parsing.marks import Marking
from headrace.front.text.parsing.messages import Messages
from headrace.front.text.parsing.named_json import NamedJson, NamedTags
from headrace.front.text.parsing.nested_tags import NestedCalls, NestedTags
from headrace.front.text.parsing.reader import CallReader
from headrace.front.text.parsing.tagged_json import BareJson, JsonTags, TaggedJson
from headrace.front.text.parsing.xml_parameters import ParameterTags, Schemas, XmlParameters
from headrace.front.text.tokenizer import Tokenizer, decode_pieces

_TAIL_TOKENS = 64
"""Enough of a prompt to see which tag or header it ends with."""
_LETTERS = string.ascii_letters + string.digits
_MAX_LEAD = 64
_BREAKS = "\r\n"
_UTF8 = codecs.getincrementaldecoder("utf-8")
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
            inside=tags is not None and begins_inside(tags, prompt_tail, unfinished=unfinished),
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


def begins_inside(tags: ReasoningTags, prompt_tail: str, *, unfinished: str | None = None) -> bool:
    """Whether the answer begins inside the reasoning: `prompt_tail` is how the prompt ends;
    `unfinished` is the text of the message that is continued, if one is. Earlier turns do not
    matter."""
    if unfinished is not None:
        opened, closed = unmarked(tags.open), unmarked(tags.close)
        return unfinished.rfind(opened) > unfinished.rfind(closed)
    tail = prompt_tail.rstrip()
    return tail.endswith(tags.open) or (tags.always and not tail.endswith(tags.close))


class ReasoningState:
    """Reads the reasoning, then hands over to `then`. `spans`: where it stands in the answer, in
    characters; its end is None while it is open. `over`: no more of it can come."""

    over = False
    _leading = True

    def __init__(self, engine: Engine, tags: ReasoningTags, then: State, *, inside: bool) -> None:
        self.spans: list[Span] = [(0, None)] if inside else []
        self._engine = engine
        self._tags = tags
        self._then = then
        self._closing = Tags([tags.close, *tags.until]) if tags.until else only(tags.close)
        self._inside = inside
        self._mode = self._begin
        self._breaks: list[str] = []

    def step(self, text: str, at: int) -> int:
        """Consumes the reasoning; afterwards the engine's state is another one."""
        return self._mode(text, at)

    def end(self, rest: str) -> None:
        """An answer that ends inside its reasoning."""
        if self._mode == self._begin and not self._inside:
            self._engine.become(self._then)
            reached = self._then.step(rest, 0) if rest else 0
            self._then.end(rest[reached:])
        elif self._mode != self._after:
            self._add(rest)
            if self._breaks:
                self._engine.sink.add(Reasoning("".join(self._breaks)))

    def _begin(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        has_open = literal(text, start, self._tags.open) if start - at <= _MAX_LEAD else False
        if has_open is None:
            return at
        if has_open:
            start += len(self._tags.open)
            self.spans = [(self._engine.consumed + start, None)]
            self._mode = self._read
            return start
        if self._inside:
            self._mode = self._read
            return self._read(text, at)
        self.over = True
        self._engine.become(self._then)
        return at

    def _read(self, text: str, at: int) -> int:
        place, tag = self._closing.find(text, at)
        self._add(text[at:place])
        if not tag:
            return place
        self.spans = [(self.spans[0][0], self._engine.consumed + place)]
        self.over = True
        self._breaks.clear()
        self._mode = self._after
        if tag != self._tags.close:
            self._engine.become(self._then)
            return place
        return place + len(tag)

    def _after(self, text: str, at: int) -> int:
        while at < len(text) and text[at] in _BREAKS:
            at += 1
        if at < len(text):
            self._engine.become(self._then)
        return at

    def _add(self, text: str) -> None:
        if self._leading:
            text = text.lstrip(_BREAKS)
            self._leading = not text
        body = text.rstrip(_BREAKS)
        if body:
            self._engine.sink.add(Reasoning("".join([*self._breaks, body])))
            self._breaks.clear()
        if len(body) < len(text):
            self._breaks.append(text[len(body) :])


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


class ReasoningTokens:
    """How many tokens of one answer are reasoning: those that begin between the tags. Counted on
    the tokens' own text, so that it does not matter whether a tag is one token or several, whether
    the prompt opened it, or how the stream was cut.

    `pieces`: what each token adds to the text; `at`: characters counted so far.
    """

    def __init__(self, pieces: Mapping[int, str | bytes]) -> None:
        self._pieces = pieces
        self._decoder = _UTF8(errors="replace")
        self.at = 0
        self._starts: list[int] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """More tokens of the answer."""
        for token_id in token_ids:
            self._starts.append(self.at)
            piece = self._pieces[token_id]
            data = piece.encode() if isinstance(piece, str) else piece
            self.at += len(self._decoder.decode(data))

    def count(self, span: Span | None) -> int:
        """Tokens that begin inside of `span` (characters; an open end takes all that follow)."""
        if span is None:
            return 0
        begin, end = span
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        return max(0, last - bisect_left(self._starts, begin))
