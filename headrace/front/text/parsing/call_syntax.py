"""Calls written as in a programming language: `f(a=1, b="x")`, or `call:f{a:1,b:<quote>x<quote>}`.

An argument is read to its end, then translated to JSON (literals.py); what is no literal goes out
as the text it is, so that nothing is lost. Without a tag only the beginning of the answer can be a
call, and only one of a function that exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.front.text.parsing.engine import Sink, Tags, literal, skip_space
from headrace.front.text.parsing.json_calls import MAX_NAME_CHARS
from headrace.front.text.parsing.literals import json_of_bare, json_of_python, quoted
from headrace.front.text.parsing.reader import CallReader

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\s*([\w.\-$]+)\s*")
_OPENING, _CLOSING = "([{", ")]}"


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """A family's way of writing. `open` empty: calls stand bare, at the beginning of the answer and
    in a list, maybe behind `prefix`. `quote` empty: texts are quoted as in Python."""

    open: str = ""
    close: str = ""
    prefix: str = ""
    lead: str = ""
    brackets: str = "()"
    assign: str = "="
    quote: str = ""


Parameters = Mapping[str, Mapping[str, Any]]


class SyntaxCalls(CallReader):
    """The state that reads content and such calls. `functions`: the parameters of each function
    there is."""

    def __init__(
        self, sink: Sink, syntax: CallSyntax, functions: Parameters, drop: Sequence[str] = ()
    ) -> None:
        framed = [syntax.close] if syntax.close and not syntax.open else []
        opens = [tag for tag in (syntax.open, syntax.prefix) if tag]
        super().__init__(sink, opens, [*framed, *drop])
        self._syntax = syntax
        self._functions = functions
        self._in_list = False
        self._word: list[str] = []
        self._count = 0
        self._keys: list[str] = []
        self._value: list[str] = []
        self._depth = 0
        self._inside = ""
        quotes = [syntax.quote] if syntax.quote else ["'", '"']
        self._stops = Tags([*quotes, *_OPENING, *_CLOSING, ","])
        self._ends = {quote: Tags([quote, *([] if syntax.quote else ["\\"])]) for quote in quotes}
        if not syntax.open:
            self._mode = self._prefix

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: an unfinished call keeps what it has."""
        if self._mode in (self._prefix, self._first, self._lead, self._read_name):
            self._outside.add("".join(self._raw))
        elif self._mode in (self._argument, self._escape):
            self._value.append(rest)
            self._send_argument()
            rest = ""
        elif self._mode == self._after_call:
            rest = ""
        super().end(rest)

    def _open(self, tag: str) -> None:
        self._mode = self._first

    # up to the name

    def _prefix(self, text: str, at: int) -> int:
        prefix = self._syntax.prefix
        has_prefix = literal(text, at, prefix) if prefix else False
        if has_prefix is None:
            return at
        self._raw = [prefix] if has_prefix else []
        self._mode = self._first
        return at + len(prefix) if has_prefix else at

    def _first(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        self._in_list = text.startswith("[", start)
        if start < len(text):
            if not self._in_list and not self._syntax.open:
                self._refuse(text[at:start])
                return start
            self._mode = self._lead
            start += self._in_list
        self._raw.append(text[at:start])
        return start

    def _lead(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        lead = self._syntax.lead
        has_lead = literal(text, start, lead) if start < len(text) else None
        if has_lead is None:
            self._raw.append(text[at:start])
            return start
        if not has_lead:
            self._refuse(text[at:start])
            return start
        self._raw.append(text[at : start + len(lead)])
        self._word.clear()
        self._mode = self._read_name
        return start + len(lead)

    def _read_name(self, text: str, at: int) -> int:
        match = _NAME.match(text, at)
        assert match is not None
        end = min(match.end(), at + MAX_NAME_CHARS - sum(map(len, self._word)))
        self._word.append(text[at:end])
        self._raw.append(text[at:end])
        if end < match.end():
            self._refuse()
        elif end < len(text):
            name = "".join(self._word)
            if name and text[end] == self._syntax.brackets[0] and self._may_call(name):
                self._outside.call()
                self._sink.begin(name)
                self._keys = list(self._functions.get(name, ()))
                self._count = 0
                self._start_argument()
                return end + 1
            self._refuse()
        return end

    def _may_call(self, name: str) -> bool:
        return bool(self._syntax.open) or name in self._functions

    # arguments

    def _start_argument(self) -> None:
        self._value.clear()
        self._depth = 0
        self._inside = ""
        self._mode = self._argument

    def _argument(self, text: str, at: int) -> int:
        stops = self._ends[self._inside] if self._inside else self._stops
        place, stop = stops.find(text, at)
        self._value.append(text[at:place])
        if not stop:
            return place
        end = place + len(stop)
        if self._inside:
            self._value.append(stop)
            if stop == self._inside:
                self._inside = ""
            else:
                self._mode = self._escape
            return end
        if not self._depth and stop in (",", *_CLOSING):
            self._send_argument()
            if stop == ",":
                self._start_argument()
            else:
                self._sink.arguments("}" if self._count else "{}")
                self._sink.end()
                self._raw = []
                self._mode = self._after_call
            return end
        self._value.append(stop)
        if stop in self._ends:
            self._inside = stop
        else:
            self._depth += (stop in _OPENING) - (stop in _CLOSING)
        return end

    def _escape(self, text: str, at: int) -> int:
        """The character behind a backslash, whatever it is."""
        self._value.append(text[at])
        self._mode = self._argument
        return at + 1

    def _send_argument(self) -> None:
        written = "".join(self._value)
        if not written.strip():
            return
        key, value = self._split(written)
        quote = self._syntax.quote
        json_value = json_of_bare(value, quote) if quote else json_of_python(value)
        if json_value is None or not json_value:
            json_value = quoted(value.strip())
        self._sink.arguments(("{" if not self._count else ", ") + quoted(key) + ": " + json_value)
        self._count += 1

    def _split(self, written: str) -> tuple[str, str]:
        """Key and value; one without a key gets the name of the parameter that stands there."""
        quote = self._syntax.quote
        if quote and written.lstrip().startswith(quote):  # a quoted key
            _, key, rest = written.split(quote, 2) if written.count(quote) > 1 else ("", "", "")
            if rest.lstrip().startswith(self._syntax.assign):
                return key, rest.lstrip()[len(self._syntax.assign) :]
        match = _KEY.match(written)
        if match and written.startswith(self._syntax.assign, match.end()):
            return match[1], written[match.end() + len(self._syntax.assign) :]
        known = self._keys[self._count : self._count + 1]
        return (known[0] if known else f"arg{self._count}"), written

    # behind a call

    def _after_call(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        if start == len(text):
            return start
        if text[start] in ",;":
            self._raw = [text[at : start + 1]]
            self._mode = self._lead
            return start + 1
        if self._in_list and text[start] == "]":
            self._in_list = False
            return start + 1
        if close := self._syntax.close:
            has_close = literal(text, start, close)
            if has_close is None:
                return start
            if has_close:
                self._mode = self._content
                return start + len(close)
        # one call per line; anything else is content again
        self._mode = self._lead if self._syntax.open and not self._in_list else self._content
        return start
