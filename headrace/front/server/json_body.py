"""Strict JSON: what two parsers could read in two ways is refused, and nothing is walked value by value.

While one body is parsed the running streams of the process wait, so the work is done in C: the decoder is strict about
UTF-8, numbers and surrogates; depth and doubled keys are then counted in what is left of the text outside its strings.
100,000 numbers take 2 ms (a walk over them: 18 ms). Only a small body that is refused is read a second time, slowly, to
say why.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

import msgspec
import numpy as np

from headrace.base.errors import InvalidRequest

MAX_JSON_DEPTH = 64
EXPLAINED_BYTES = 64 * 1024
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = np.zeros(256, np.int8)
_STEP[[*b"[{"]], _STEP[[*b"]}"]] = 1, -1


def parse_json(body: bytes) -> Any:
    """The document; InvalidRequest says what is wrong with it."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        if len(body) > EXPLAINED_BYTES:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        value = _read_slowly(body)  # left to the field it stands in: a number beyond every float
    outside = _outside_strings(body)
    if _depth(outside) > MAX_JSON_DEPTH:
        raise _too_deep()
    if outside.count(b":") != _outside_strings(msgspec.json.encode(value)).count(b":"):
        if len(body) <= EXPLAINED_BYTES:
            _read_slowly(body)
        raise InvalidRequest("a key occurs twice in one object")
    return value


def _outside_strings(text: bytes) -> bytes:
    """Valid JSON without the insides of its strings."""
    return b"".join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _depth(outside: bytes) -> int:
    steps = _STEP[np.frombuffer(outside.translate(None, _NO_BRACKETS), np.uint8)]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


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
    except RecursionError:
        raise _too_deep() from None
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


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body nests deeper than {MAX_JSON_DEPTH} levels")
