"""Calls written as JSON: an object with the name and the arguments, or a list of such objects.

The arguments go out as the model wrote them, character by character, never decoded and encoded
again. Nothing of a call goes out before both its name and the beginning of its arguments are known;
an object that turns out to be none is given back as text. Bytes are looked at once: strings and
nesting are followed, no tree is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

import msgspec

from headrace.front.text.parsing.engine import Outside, Sink, skip_space
from headrace.front.text.parsing.json_text import JsonString, JsonValue

MAX_NAME_CHARS = 256
_SCALAR_END = re.compile(r"[,}\]\s]")
_VALUE_BEGINS = '{["-0123456789tfn'
_Mode: TypeAlias = Callable[[str, int], int]


class Outcome(Enum):
    """How far the reading of calls has come."""

    MORE = 1
    DONE = 2
    REFUSED = 3


class JsonKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's objects call the name and the arguments. `named`: the first key is the
    function's name itself and what stands under it, an object, the arguments."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    named: bool = False


class JsonCalls:
    """Reads one object or list of objects. `outcome` REFUSED: `refused` is the text that was no
    call.

    `names`: the functions that exist, where the grammar has no tag to tell a call from an answer in
    JSON.
    """

    def __init__(self, sink: Sink, keys: JsonKeys, *, names: frozenset[str] | None = None) -> None:
        self._sink = sink
        self._keys = keys
        self._names = names
        self.start("")

    def start(self, tag: str) -> None:
        """From the beginning; `tag` is the text before, which belongs to what may be refused."""
        self.outcome = Outcome.MORE
        self._in_list = False
        self._mode: _Mode = self._first
        self._raw: list[str] = [tag]
        self._reset_object()

    @property
    def refused(self) -> str:
        """The text read since the last complete call."""
        return "".join(self._raw)

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._begun

    def read(self, text: str, at: int) -> int:
        """Consumes from `at` as far as it goes, or to the end of the calls."""
        begin = at
        self._kept = at
        while self.outcome is Outcome.MORE and at < len(text):
            at = self._mode(text, at)
        if not self._begun:
            self._raw.append(text[max(begin, self._kept) : at])
        return at

    def read_beside(self, outside: Outside, text: str, at: int) -> int:
        """`read` beside content: that is told of every call, and gets what was none."""
        before = self._sink.num_calls
        at = self.read(text, at)
        if self._sink.num_calls > before:
            outside.call()
        if self.outcome is Outcome.REFUSED:
            outside.add(self.refused)
        return at

    def _reset_object(self) -> None:
        self._begun = False
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] = []
        self._string: list[str] = []
        self._open_string = JsonString()
        self._key = ""

    def _refuse(self, at: int) -> int:
        self.outcome = Outcome.REFUSED if not self._begun else Outcome.DONE
        return at

    # the frame around objects

    def _first(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == "[" and not self._in_list:
            self._in_list = True
            return at + 1
        return self._object(text, at)

    def _object(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != "{":
            return self._refuse(at)
        self._mode = self._key_or_end
        return at + 1

    def _after_object(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if self._in_list and text[at] == ",":
            self._mode = self._object
            return at + 1
        if self._in_list and text[at] == "]":
            self._raw.clear()
            self._kept = at + 1
            self.outcome = Outcome.DONE
            return at + 1
        if not self._in_list and text[at] == ";":
            self._mode = self._object
            return at + 1
        if not self._in_list and text[at] == "{":
            return self._object(text, at)
        self.outcome = Outcome.DONE
        return at

    # inside an object

    def _key_or_end(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._mode = self._read_key
            return at + 1
        return self._close_object(text, at) if text[at] == "}" else self._refuse(at)

    def _read_key(self, text: str, at: int) -> int:
        at, done = self._through_string(text, at)
        if done:
            self._key = self._taken_string() or ""
            self._mode = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._refuse(at)
        self._mode = self._value
        return at + 1

    def _value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if self._keys.named and self._name is None:
            return self._under_its_name(text, at)
        if self._key in self._keys.name and self._name is None:
            if text[at] != '"':
                return self._refuse(at)
            self._mode = self._read_name
            return at + 1
        if self._key in self._keys.arguments and not self._has_arguments:
            return self._arguments_begin(text, at)
        self._mode = self._value_mode(text[at], then=self._drop)
        return at

    def _under_its_name(self, text: str, at: int) -> int:
        if text[at] != "{" or not self._may_name(self._key):
            return self._refuse(at)
        self._name = self._key
        return self._arguments_begin(text, at)

    def _may_name(self, name: str | None) -> bool:
        known = self._names is None or name in self._names
        return bool(name) and len(name or "") <= MAX_NAME_CHARS and known

    def _read_name(self, text: str, at: int) -> int:
        at, done = self._through_string(text, at)
        if done:  # not before: where it is refused must not depend on how the text was cut
            name = self._taken_string()
            if not self._may_name(name):
                return self._refuse(at)
            self._name = name
            if self._has_arguments:
                self._begin(at)
            self._mode = self._comma_or_end
        return at

    def _arguments_begin(self, text: str, at: int) -> int:
        if text[at] not in _VALUE_BEGINS:
            return self._refuse(at)
        self._has_arguments = True
        if self._name is not None:
            self._begin(at)
        if text[at] == '"':
            self._mode = self._arguments_string
            return at + 1
        self._mode = self._value_mode(text[at], then=self._send)
        return at

    def _arguments_string(self, text: str, at: int) -> int:
        """Arguments that are JSON inside of a JSON string: unwrapped once."""
        at, done = self._through_string(text, at)
        if done:
            self._send(self._taken_string() or "{}")
            self._mode = self._comma_or_end
        return at

    def _comma_or_end(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._mode = self._key_or_end
            return at + 1
        return self._close_object(text, at) if text[at] == "}" else self._refuse(at)

    def _close_object(self, text: str, at: int) -> int:
        if self._name is None:
            return self._refuse(at)
        if not self._begun:
            if self._names is not None and not self._has_arguments:
                return self._refuse(at)
            self._begin(at)
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._sink.end()
        self._reset_object()
        self._raw.clear()
        self._kept = at + 1
        self._mode = self._after_object
        return at + 1

    def _begin(self, at: int) -> None:
        assert self._name is not None
        self._begun = True
        self._sink.begin(self._name)
        self._sink.arguments("".join(self._early))
        self._early.clear()

    # values and strings

    def _drop(self, piece: str) -> None:
        """What no one asked for."""

    def _send(self, piece: str) -> None:
        if self._begun:
            self._sink.arguments(piece)
        else:
            self._early.append(piece)

    def _value_mode(self, first: str, *, then: Callable[[str], None]) -> _Mode:
        if first in '{["':
            value = JsonValue()
            return lambda text, at: self._nested(text, at, value, then)
        self._string.clear()
        return lambda text, at: self._scalar(text, at, then)

    def _scalar(self, text: str, at: int, then: Callable[[str], None]) -> int:
        """A number, true, false or null; missing arguments are an empty object."""
        match = _SCALAR_END.search(text, at)
        end = match.start() if match else len(text)
        self._string.append(text[at:end])
        if match:
            word = "".join(self._string)
            self._string.clear()
            then("{}" if word == "null" else word)
            self._mode = self._comma_or_end
        return end

    def _nested(self, text: str, at: int, value: JsonValue, then: Callable[[str], None]) -> int:
        """An object, a list or a text, up to its end."""
        end = value.read(text, at)
        then(text[at:end])
        if value.done:
            self._mode = self._comma_or_end
        return end

    def _through_string(self, text: str, at: int) -> tuple[int, bool]:
        """To the end of a string whose opening quote is behind; whether it was reached."""
        end, done = self._open_string.read(text, at)
        self._string.append(text[at:end])
        return end, done

    def _taken_string(self) -> str | None:
        """The string that was kept, decoded; None if it is not valid JSON."""
        written = "".join(self._string)
        self._string.clear()
        try:
            return msgspec.json.decode('"' + written, type=str)
        except msgspec.DecodeError:
            return None
