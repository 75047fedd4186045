"""The input of a tool on its way out, piece by piece, as one JSON object whatever the model writes.

Clients parse the pieces joined so far and fail where they are no JSON, and only an object is an
input. What the model wrote is never mended in silence: where it breaks off or is no object, what is
out already is closed and the whole text stands beside it under `INVALID_JSON`, the name that the
vendor gives to such text. No schema knows that property, so that clients refuse the call and the
model is told. Text goes out as soon as this is still possible after it: inside of values at once,
keys and bare words once they are complete. Time is linear in the text."""

from __future__ import annotations

import re
from enum import Enum, auto

import orjson

INVALID = "INVALID_JSON"
MAX_DEPTH = 128
MAX_HELD = 16384
_SPACE = re.compile(r"[ \t\n\r]*")
_HEX = "[0-9a-fA-F]"
_IN_STRING = re.compile(
    r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]'
    rf"|\\u(?:[0-9a-cA-CeEfF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
    rf"|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})*"
)
_LONGEST_ESCAPE = 12
_WORD = re.compile(r'[^ \t\n\r,:\[\]{}"]*')


class _At(Enum):
    """What may come next."""

    START = auto()
    FIRST = auto()  # of an object or list: an entry or its end
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_TEXT = auto()
    AFTER = auto()  # an entry: a comma or the end
    OVER = auto()


_SAFE = frozenset({_At.FIRST, _At.IN_TEXT, _At.AFTER})
"""Where the object can be ended by brackets alone."""


class ToolInput:
    """One call's arguments while they come. `document` is the JSON of the object that was sent,
    once it is over: as text, since its numbers may be greater than what is parsed here holds."""

    def __init__(self) -> None:
        self.document = "{}"
        self._raw: list[str] = []
        self._sent: list[str] = []
        self._held = ""
        self._place = 0
        self._safe = 0
        self._at = _At.START
        self._open: list[str] = []
        self._wrong = False

    def push(self, text: str) -> str:
        """What can go out now that `text` has come."""
        self._raw.append(text)
        if self._wrong:
            return ""
        self._held += text
        while not self._wrong and self._step():
            if self._at in _SAFE:
                self._safe = self._place
        self._wrong = self._wrong or len(self._held) - self._safe > MAX_HELD
        return self._let(self._safe)

    def end(self) -> str:
        """What goes out last, now that no more comes."""
        raw = "".join(self._raw)
        if self._at is _At.OVER and not self._wrong:
            out = self._let(len(self._held))
        elif raw.strip() in ("", "null"):
            out = ""
        else:
            out = self._closed(raw)
            self._sent.append(out)
        self.document = "".join(self._sent) or "{}"
        assert isinstance(orjson.loads(self.document), dict)
        return out

    def _let(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self._place -= count
        self._safe = 0
        if out:
            self._sent.append(out)
        return out

    def _closed(self, raw: str) -> str:
        """The end of an object that is none so far, with the whole text in it."""
        marker = orjson.dumps({INVALID: _encodable(raw)}).decode()
        if not self._sent:
            return marker
        quote = '"' if self._at is _At.IN_TEXT else ""
        inner = "".join("}" if kind == "{" else "]" for kind in reversed(self._open[1:]))
        alone = "".join(self._sent).strip() == "{"
        return quote + inner + ("" if alone else ",") + marker[1:]

    def _step(self) -> bool:
        """Reads one thing; False where more must come first."""
        if self._at in (_At.IN_KEY, _At.IN_TEXT):
            return self._string()
        space = _SPACE.match(self._held, self._place)
        assert space is not None
        self._place = space.end()
        if self._place == len(self._held):
            return False
        character = self._held[self._place]
        match self._at:
            case _At.START:
                return self._take(character == "{") and self._begin(character)
            case _At.COLON:
                return self._take(character == ":", _At.VALUE)
            case _At.KEY:
                return self._take(character == '"', _At.IN_KEY)
            case _At.AFTER:
                return self._after(character)
            case _At.FIRST if character in "}]":
                return self._after(character)
            case _At.FIRST if self._open[-1] == "{":
                return self._take(character == '"', _At.IN_KEY)
            case _At.FIRST | _At.VALUE:
                return self._value(character)
        self._wrong = True  # something stands behind the object
        return False

    def _take(self, fits: bool, then: _At | None = None) -> bool:
        """One character that fits, or the text is wrong."""
        self._wrong = not fits
        if fits:
            self._place += 1
            self._at = self._at if then is None else then
        return fits

    def _begin(self, character: str) -> bool:
        self._open.append(character)
        self._at = _At.FIRST
        self._wrong = len(self._open) > MAX_DEPTH
        return not self._wrong

    def _after(self, character: str) -> bool:
        kind = self._open[-1]
        if character == ",":
            return self._take(True, _At.KEY if kind == "{" else _At.VALUE)
        if len(self._open) == 1 and character == "}":
            return self._take(True, _At.OVER)
        if not self._take(character == ("}" if kind == "{" else "]"), _At.AFTER):
            return False
        self._open.pop()
        return True

    def _value(self, character: str) -> bool:
        if character == '"':
            return self._take(True, _At.IN_TEXT)
        if character in "{[":
            return self._take(True) and self._begin(character)
        word = _WORD.match(self._held, self._place)
        assert word is not None
        if word.end() == len(self._held):
            return False  # it may go on
        try:
            orjson.loads(word[0])
        except orjson.JSONDecodeError:
            self._wrong = True
            return False
        self._place, self._at = word.end(), _At.AFTER
        return True

    def _string(self) -> bool:
        match = _IN_STRING.match(self._held, self._place)
        assert match is not None
        moved, self._place = match.end() > self._place, match.end()
        rest = self._held[self._place : self._place + _LONGEST_ESCAPE]
        if rest.startswith('"'):
            return self._take(True, _At.COLON if self._at is _At.IN_KEY else _At.AFTER)
        if rest and (rest[0] != "\\" or len(rest) == _LONGEST_ESCAPE):
            self._wrong = True
            if self._at is _At.IN_TEXT:
                self._safe = self._place
            return False
        return moved


def _encodable(text: str) -> str:
    """Text without halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()
