"""Strict JSON: what two parsers could read in two ways is refused, and nothing is walked value by value.

While one body is parsed the running streams of the process wait, so the work is done in C: depth and number of its
objects and arrays are counted in what is left of the text outside its strings, before any of them is made; the decoder
is strict about UTF-8, numbers and surrogates; doubled keys show as entries that are missing afterwards. 100,000 numbers
take 2 ms (a walk over them: 18 ms). Only a small body that is refused is read a second time, slowly, to say why.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

import msgspec
import numpy as np

from headrace.base.errors import InvalidRequest

MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 131_072
"""Objects and arrays of one body: each takes 64 to 300 bytes once it is made, and two of its own in the body."""
EXPLAINED_BYTES = 64 * 1024
_QUOTE = ord('"')
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}":'))
_STEP = np.zeros(256, np.int8)
_STEP[[*b"[{"]], _STEP[[*b"]}"]] = 1, -1


def parse_json(body: bytes) -> Any:
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
        value = _read_slowly(body)  # left to the field it stands in: a number beyond every float
    if marks != _marks_outside_strings(msgspec.json.encode(value)):
        if len(body) <= EXPLAINED_BYTES:
            _read_slowly(body)
        raise InvalidRequest("a key occurs twice in one object")
    return value


def _marks_outside_strings(text: bytes) -> bytes:
    """Brackets, braces and colons outside of strings; of what is no JSON, those before it ceases to be.

    Two quotes side by side come and go without a change to what is inside. What is left of most bodies has no quote.
    """
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    bare = bare.replace(b'""', b"")
    if b'"' not in bare:
        return bare
    marks = np.frombuffer(bare, np.uint8)
    return marks[~np.bitwise_xor.accumulate(marks == _QUOTE)].tobytes()


def _check_brackets(marks: bytes) -> None:
    steps = _STEP[np.frombuffer(marks, np.uint8)]
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > MAX_JSON_DEPTH:
        raise InvalidRequest(f"the body nests deeper than {MAX_JSON_DEPTH} levels")
    if (count := int(np.count_nonzero(steps > 0))) > MAX_JSON_CONTAINERS:
        raise InvalidRequest(
            f"the body holds {count} objects and arrays; {MAX_JSON_CONTAINERS} are allowed"
        )


def _read_slowly(body: bytes) -> Any:
    """What Python's own parser makes of the body; its reasons for refusing one are in plain words."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds a lone surrogate, which is no character") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at byte {error.pos}"
        ) from None
    except ValueError:
        raise InvalidRequest("the body is not valid JSON: a number has too many digits") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)[:100]
        raise InvalidRequest(f"the key {twice!r} occurs twice in one object", field=twice)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not valid JSON: {name} is not a JSON number")
