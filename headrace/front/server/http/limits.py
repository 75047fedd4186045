"""Limits on a request, enforced while its bytes stream in: header timeouts, the size of the body
(also after decompression), its idle time, content type and encoding; and strict JSON: what two
parsers could read in two ways is refused, and nothing is walked value by value.

While one body is parsed the running streams of the process wait, so the work is done in C: depth
and number of its objects and arrays are counted in what is left of the text outside its strings,
before any of them is made; the decoder is strict about UTF-8, numbers and surrogates; doubled keys
show as entries that are missing afterwards. 100,000 numbers take 2 ms (a walk over them: 18 ms).
Only a small body that is refused is read a second time, slowly, to say why."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections import Counter
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np
from starlette.requests import Request

from headrace.base.errors import InvalidRequest, RequestError, TooLarge, UnsupportedMedia
from headrace.base.optional import available, require

THREAD_BYTES = 256 * 1024  # from here on a body is parsed in a thread (some 2 ms)


TIMEOUT_HEADER = "x-request-timeout-s"


MAX_TIMEOUT_S = 86400


MAX_GZIP_MEMBERS = 64


class BodyTimeout(RequestError):
    """The body stopped arriving."""

    status = 408


class _Inflater(Protocol):
    def feed(self, data: bytes, *, room: int) -> bytes:
        """Decompresses `data`; at most room + 1 bytes come out."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the compressed stream has ended properly."""
        ...


class _Gzip:
    """Members may follow each other (RFC 1952, 2.2); not many, for an empty one costs work and
    gives nothing."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self._num_members = 1

    def feed(self, data: bytes, *, room: int) -> bytes:
        out = b""
        while data and len(out) <= room:
            if self._stream.eof:
                self._begin_member()
            out += self._stream.decompress(data, room + 1 - len(out))
            data = self._stream.unused_data
        return out

    def _begin_member(self) -> None:
        self._num_members += 1
        if self._num_members > MAX_GZIP_MEMBERS:
            raise InvalidRequest(
                f"the gzip body has more than {MAX_GZIP_MEMBERS} members; compress it as one"
            )
        self._stream = zlib.decompressobj(wbits=31)

    @property
    def finished(self) -> bool:
        return self._stream.eof


class _Zstd:
    """The window is capped, so that a header cannot make the decoder allocate more than the limit
    of the body."""

    def __init__(self) -> None:
        zstandard: Any = require("zstandard", extra="compression", purpose="a zstd body")
        self._stream = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj()
        self._error: type[Exception] = zstandard.ZstdError

    def feed(self, data: bytes, *, room: int) -> bytes:
        # zstd has no bound on output per call: small pieces bound it (a block gives 128 KiB).
        out = bytearray()
        for start in range(0, len(data), 64):
            try:
                out += self._stream.decompress(data[start : start + 64])
            except self._error as error:
                raise ValueError("broken zstd stream") from error
            if len(out) > room:
                break
        return bytes(out)

    @property
    def finished(self) -> bool:
        return bool(self._stream.eof)


async def read_json(request: Request, *, max_bytes: int, idle_s: float) -> Any:
    """The JSON document in the body; every breach of a limit is the RequestError that names it."""
    _check_content_type(request)
    body = await _read_body(request, max_bytes=max_bytes, idle_s=idle_s)
    if len(body) < THREAD_BYTES:
        return parse_json(body)
    return await asyncio.to_thread(parse_json, body)


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia(
            f"content-type {content_type[:100]!r} is not supported; send application/json"
        )


async def _read_body(request: Request, *, max_bytes: int, idle_s: float) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    inflater = _inflater(request.headers.get("content-encoding", "identity"))
    body = bytearray()
    received = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise BodyTimeout(f"the body paused for more than {idle_s:g} s") from None
        if chunk is None:
            break
        received += len(chunk)
        body += chunk if inflater is None else _inflate(inflater, chunk, room=max_bytes - len(body))
        if max(received, len(body)) > max_bytes:
            raise _too_large(max_bytes)
    if inflater is not None and not inflater.finished:
        raise InvalidRequest("the compressed body ends too early")
    return bytes(body)


def _inflater(encoding: str) -> _Inflater | None:
    match encoding.strip().lower():
        case "identity" | "":
            return None
        case "gzip" | "x-gzip":
            return _Gzip()
        case "zstd" if available("zstandard"):
            return _Zstd()
    raise UnsupportedMedia(
        f"content-encoding {encoding[:50]!r} is not supported; send gzip, zstd or identity"
    )


def _inflate(inflater: _Inflater, chunk: bytes, *, room: int) -> bytes:
    try:
        return inflater.feed(chunk, room=room)
    except (zlib.error, ValueError):
        raise InvalidRequest("the compressed body is broken") from None


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes (counted after decompression)")


def header_timeout_s(value: bytes | None) -> float | None:
    """The deadline in an X-Request-Timeout-S header: seconds, above 0 and at most a day."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        shown = value[:50].decode("ascii", "replace")
        raise InvalidRequest(
            f"{TIMEOUT_HEADER}: {shown!r} given; allowed: seconds above 0, at most {MAX_TIMEOUT_S}",
            field=TIMEOUT_HEADER,
        )
    return seconds


MAX_JSON_DEPTH = 64


MAX_JSON_CONTAINERS = 131_072
"""Objects and arrays of one body: each takes 64 to 300 bytes once it is made, and two of its own in
the body."""


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
    """Brackets, braces and colons outside of strings; of what is no JSON, those before it ceases to
    be.

    Two quotes side by side come and go without a change to what is inside. What is left of most
    bodies has no quote."""
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
    """What Python's own parser makes of the body; its reasons for refusing one are in plain
    words."""
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
    document = dict(pairs)
    if len(document) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)[:100]
        raise InvalidRequest(f"the key {twice!r} occurs twice in one object", field=twice)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not valid JSON: {name} is not a JSON number")
