"""Reasoning before the answer: what stands between an opening and a closing tag.

The prompt may have opened the tag already (its template does, or an unfinished message is
continued). Only the beginning of the answer can open it, so that text about the tags stays text;
the first closing tag ends it. Line breaks that templates put around the tags belong to the tags.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import msgspec

from headrace.front.text.parsing.blocks import BlockTags
from headrace.front.text.parsing.engine import (
    Engine,
    Reasoning,
    State,
    Tags,
    literal,
    only,
    skip_space,
    unmarked,
)
from headrace.front.text.parsing.harmony import HarmonyTags

_MAX_LEAD = 64
_BREAKS = "\r\n"
_UTF8 = codecs.getincrementaldecoder("utf-8")


class ReasoningTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's tags. `always`: the answer begins inside, unless the prompt has closed the tag
    already. `kept`: the reasoning stays in the content, tags included. `frame`: tags that enclose
    the answer itself. `until`: what ends the reasoning without `close`, and is read as what follows
    it. `answer`: what the answer begins with. `messages`: the whole answer is a row of messages;
    `open` and `close` then begin its reasoning and its final message."""

    open: str
    close: str
    always: bool = False
    kept: bool = False
    frame: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    answer: str = ""
    messages: HarmonyTags | BlockTags | None = None

    def begins_inside(self, prompt_tail: str, *, unfinished: str | None = None) -> bool:
        """Whether the answer begins inside: `prompt_tail` is how the prompt ends; `unfinished` is
         the text of the message that is continued, if one is. Earlier turns do not matter
        ."""
        if unfinished is not None:
            opened, closed = unmarked(self.open), unmarked(self.close)
            return unfinished.rfind(opened) > unfinished.rfind(closed)
        tail = prompt_tail.rstrip()
        return tail.endswith(self.open) or (self.always and not tail.endswith(self.close))


class ReasoningState:
    """Reads the reasoning, then hands over to `then`. `spans`: where it stands in the answer, in
    characters; its end is None while it is open. `over`: no more of it can come."""

    over = False
    _leading = True

    def __init__(self, engine: Engine, tags: ReasoningTags, then: State, *, inside: bool) -> None:
        self.spans: list[tuple[int, int | None]] = [(0, None)] if inside else []
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

    def count(self, span: tuple[int, int | None] | None) -> int:
        """Tokens that begin inside of `span` (characters; an open end takes all that follow)."""
        if span is None:
            return 0
        begin, end = span
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        return max(0, last - bisect_left(self._starts, begin))
