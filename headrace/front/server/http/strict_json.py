"""Strict JSON: what two parsers could read in two ways is refused, and nothing is walked value by
value.

While one body is parsed the running streams of the process wait, so the work is done in C: depth
and number of its objects and arrays are counted in what is left of the text outside its strings,
before any of them is made; the decoder is strict about UTF-8, numbers and surrogates; doubled keys
show as entries that are missing afterwards. 100,000 numbers take 2 ms (a walk over them: 18 ms).
Only a small body that is refused is read a second time, slowly, to say why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import InvalidRequest
from headrace.front.server.http.slow_json import read_slowly

MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 131_072
"""Objects and arrays of one body: each takes 64 to 300 bytes once it is made, and two of its own in
the body."""
MAX_JSON_VALUES = 2**21
"""Values of one body: 0.1 s for so many numbers, in which the process's streams wait."""
EXPLAINED_BYTES = 64 * 1024
PIECE_BYTES = 128 * 1024  # about 0.4 ms of looking for brackets
_QUOTE = ord('"')
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}":,'))
_STEP = np.zeros(256, np.int8)


_STEP[[*b"[{"]], _STEP[[*b"]}"]] = 1, -1


def has_marks(body: bytes | bytearray, most: int) -> bool:
    """Whether there are more than `most` brackets, quotes, colons and commas in it (those within
    texts count too): how many values can come of it. It is looked at no further than that."""
    return any(count > most for count in accumulate(len(_marks(p)) for p in _pieces(body)))


def parse_json(body: bytes | bytearray) -> Any:
    """The document; InvalidRequest says what is wrong with it."""
    marks = _marks_outside_strings(body)
    _check_brackets(marks)
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        if len(body) > EXPLAINED_BYTES:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        value = read_slowly(
            bytes(body)
        )  # left to the field it stands in: a number beyond every float
    if marks != _marks_outside_strings(msgspec.json.encode(value)):
        if len(body) <= EXPLAINED_BYTES:
            read_slowly(bytes(body))
        raise InvalidRequest("a key occurs twice in one object")
    return value


def _marks_outside_strings(text: bytes | bytearray) -> bytes:
    """Brackets, braces, colons, commas outside of strings; of no JSON, those before it is none.

    Two quotes side by side come and go without a change to what is inside. What is left of most
    bodies has no quote."""
    bare = _marks(text) if len(text) <= PIECE_BYTES else _marks_by_piece(text)
    if b'"' not in bare:
        return bytes(bare)
    marks = np.frombuffer(bare, np.uint8)
    return marks[~np.bitwise_xor.accumulate(marks == _QUOTE)].tobytes()


def _marks_by_piece(text: bytes | bytearray) -> bytes:
    """The same: while a piece is looked at, no other thread of this process runs."""
    return b"".join(map(_marks, _pieces(text))).replace(b'""', b"")


def _pieces(text: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """The text, cut where no backslash stands before its character."""
    begin = 0
    while piece := text[begin : begin + PIECE_BYTES]:
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]
        yield piece
        begin += len(piece)


def _marks(text: bytes | bytearray) -> bytes | bytearray:
    bare = text if b"\\" not in text else text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return bare.translate(None, _NO_MARKS).replace(b'""', b"")


def _check_brackets(marks: bytes) -> None:
    if marks.count(b",") >= MAX_JSON_VALUES:
        raise InvalidRequest(f"the body holds more than {MAX_JSON_VALUES} values")
    steps = _STEP[np.frombuffer(marks, np.uint8)]
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > MAX_JSON_DEPTH:
        raise InvalidRequest(f"the body nests deeper than {MAX_JSON_DEPTH} levels")
    if (count := int(np.count_nonzero(steps > 0))) > MAX_JSON_CONTAINERS:
        raise InvalidRequest(
            f"the body holds {count} objects and arrays; {MAX_JSON_CONTAINERS} are allowed"
        )
