"""Follows JSON text to the end of a string or a value without reading it twice and without building
a tree."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]]')


class JsonString:
    """The rest of one string, whose opening quote is behind."""

    def __init__(self) -> None:
        self._escaped = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """The place behind the closing quote or the end of `text`; whether the string has ended."""
        if self._escaped:
            self._escaped = False
            at += 1
        while True:
            match = _IN_STRING.search(text, at)
            if match is None:
                return len(text), False
            at = match.end()
            if match[0] == '"':
                return at, True
            if at == len(text):
                self._escaped = True
                return at, False
            at += 1


class JsonValue:
    """One object, list or text from its first character on. `done`: its end was read."""

    def __init__(self) -> None:
        self.done = False
        self._string: JsonString | None = None
        self._depth = 0

    def read(self, text: str, at: int) -> int:
        """The place behind the value, or the end of `text`."""
        while at < len(text) and not self.done:
            if self._string is not None:
                at, ended = self._string.read(text, at)
                if ended:
                    self._string = None
                    self.done = not self._depth
                continue
            match = _IN_VALUE.search(text, at)
            if match is None:
                return len(text)
            at = match.end()
            if match[0] == '"':
                self._string = JsonString()
            else:
                self._depth += 1 if match[0] in "{[" else -1
                self.done = self._depth <= 0
        return at
