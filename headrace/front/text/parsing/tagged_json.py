"""Calls in JSON between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A tag inside of a JSON string is text of that string. What stands between the tags and is no call is
content, tags included.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.front.text.parsing.engine import Modes, Outside, Sink, literal, skip_space
from headrace.front.text.parsing.json_calls import JsonCalls, JsonKeys, Outcome
from headrace.front.text.parsing.reader import CallReader


class JsonTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's tags and keys. `close` may be missing in the text, and is empty where a family has
    none. `also`: tags that models of the family write in place of `open`; `drop`: tags around
    calls."""

    open: str
    close: str = ""
    also: tuple[str, ...] = ()
    keys: JsonKeys = JsonKeys()
    drop: tuple[str, ...] = ()


class TaggedJson(CallReader):
    """The state that reads content and tagged calls."""

    def __init__(self, sink: Sink, tags: JsonTags, drop: Sequence[str] = ()) -> None:
        super().__init__(sink, [tags.open, *tags.also], [*tags.drop, *drop])
        self._tags = tags
        self._calls = JsonCalls(sink, tags.keys)

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: what had not become a call is content."""
        if self._mode == self._body and not self._calls.in_call:
            self._outside.add(self._calls.refused)
        if self._mode != self._closing:
            self._outside.add(rest)
        self._outside.flush()

    def _open(self, tag: str) -> None:
        self._calls.start(tag)
        self._mode = self._body

    def _body(self, text: str, at: int) -> int:
        at = self._calls.read_beside(self._outside, text, at)
        if self._calls.outcome is Outcome.REFUSED:
            self._mode = self._content
        elif self._calls.outcome is Outcome.DONE:
            self._mode = self._closing
        return at

    def _closing(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        if start < len(text):
            has_close = literal(text, start, self._tags.close) if self._tags.close else False
            if has_close is None:
                return start
            self._mode = self._content
            start += len(self._tags.close) if has_close else 0
        return start


class BareJson(Modes):
    """Calls in JSON without tags: the whole answer is an object, or several with semicolons, or a
    list of them.

    Only the beginning of the answer can be a call, and only one of a function that exists; so an
    answer in JSON stays what it is. `prefix` is a tag that some models write before.
    """

    def __init__(
        self, sink: Sink, keys: JsonKeys, *, names: frozenset[str], prefix: str = ""
    ) -> None:
        self._sink = sink
        self._prefix = prefix
        self._outside = Outside(sink)
        self._calls = JsonCalls(sink, keys, names=names)
        self._mode = self._begin

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: what had not become a call is content."""
        if self._mode == self._body and not self._calls.in_call:
            self._outside.add(self._calls.refused)
        self._outside.add(rest)
        self._outside.flush()

    def _begin(self, text: str, at: int) -> int:
        has_prefix = literal(text, at, self._prefix) if self._prefix else False
        if has_prefix is None:
            return at
        self._calls.start(self._prefix if has_prefix else "")
        self._mode = self._body
        return self._body(text, at + len(self._prefix) if has_prefix else at)

    def _body(self, text: str, at: int) -> int:
        at = self._calls.read_beside(self._outside, text, at)
        if self._calls.outcome is not Outcome.MORE:
            self._mode = self._content
        return at

    def _content(self, text: str, at: int) -> int:
        self._outside.add(text[at:])
        return len(text)
