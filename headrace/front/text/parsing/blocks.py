"""Answers in typed blocks: `<message>HEADER<kind>TEXT<end>`, one after the other, in any order.

A block's kind is a control token: reasoning, text, or a call whose text is a JSON object with name
and arguments. The header before it repeats a call's name and says nothing more. Text that no block
holds is content.
"""

from __future__ import annotations

import re

import msgspec

from headrace.front.text.parsing.engine import Engine, Tags
from headrace.front.text.parsing.json_calls import MAX_NAME_CHARS, JsonCalls, JsonKeys, Outcome
from headrace.front.text.parsing.messages import Kind, Messages

_HEADER = re.compile(r"\s*[\w.\-]*\s*")


class BlockTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's control tokens; `ends`: what ends a block, the usual one first."""

    start: str
    thought: str
    text: str
    call: str
    ends: tuple[str, ...]
    keys: JsonKeys = JsonKeys()

    @property
    def next(self) -> str:
        """What ends a block and begins the header of the next."""
        return self.ends[0] + self.start


class Blocks(Messages):
    """The state. `calls`: whether tools are offered, else a call's text is content."""

    def __init__(
        self,
        engine: Engine,
        tags: BlockTags,
        *,
        calls: bool,
        reasons: bool = True,
        prompt_tail: str = "",
    ) -> None:
        super().__init__(engine)
        kinds = [tags.thought, tags.text, tags.call]
        self._kinds = {tags.thought: Kind.REASONING if reasons else Kind.CONTENT}
        self._kinds |= {tags.text: Kind.CONTENT, tags.call: Kind.CALL if calls else Kind.CONTENT}
        self._tags = tags
        self._all = Tags([tags.start, *kinds, *tags.ends])
        self._ends = Tags([tags.start, *tags.ends])
        self._calls = JsonCalls(self._sink, tags.keys)
        self._head = ""
        self._mode = self._header
        self._begin(prompt_tail)

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: a call that has not become one is content."""
        if self._mode == self._header:
            self._say(self._head + rest)
        elif self._mode == self._call:
            if not self._calls.in_call:
                self._say(self._calls.refused + rest)
        elif self._mode == self._body:
            self._say(rest)

    def _begin(self, prompt_tail: str) -> None:
        """The block that the prompt has opened, if it has; no other turn's."""
        _, opened, message = prompt_tail.rpartition(self._tags.start)
        place, tag = self._all.find(message, 0) if opened else (0, "")
        if tag in self._kinds and not self._ends.find(message, place)[1]:
            self._open(tag, at=0)

    def _header(self, text: str, at: int) -> int:
        """Up to a block's kind; what is no name is content that stands alone."""
        place, tag = self._all.find(text, at, MAX_NAME_CHARS)
        head = self._head + text[at:place]
        if len(head) > MAX_NAME_CHARS or not _HEADER.fullmatch(head):
            self._alone()
            return at
        self._head = head
        if tag in self._kinds:
            self._head = ""
            self._open(tag, at=self._engine.consumed + place + len(tag))
        elif tag:
            self._head = head if head.strip() else ""
            self._alone()
            self._mode = self._header
        return place + len(tag)

    def _alone(self) -> None:
        """The header was none: it is content, and so is what follows it."""
        self._begin_message(Kind.CONTENT, 0)
        self._mode = self._body
        self._say(self._head)
        self._head = ""

    def _open(self, tag: str, *, at: int) -> None:
        kind = self._kinds[tag]
        self._begin_message(kind, at)
        self._mode = self._body
        if kind is Kind.CALL:
            self._calls.start("")
            self._mode = self._call

    def _body(self, text: str, at: int) -> int:
        place, tag = self._ends.find(text, at)
        self._say(text[at:place])
        if tag:
            self._end_message(self._engine.consumed + place)
            self._mode = self._header
        return place + len(tag)

    def _call(self, text: str, at: int) -> int:
        before = self._sink.num_calls
        at = self._calls.read(text, at)
        if self._calls.outcome is Outcome.MORE:
            return at
        self._begin_message(Kind.CONTENT, 0)
        if self._calls.outcome is Outcome.REFUSED and self._sink.num_calls == before:
            self._say(self._calls.refused)
        self._mode = self._body
        return at
