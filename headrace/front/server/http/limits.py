"""Limits on a request, enforced while its bytes stream in: header timeouts, the size of the body
(also after decompression), its idle time, content type and encoding; and strict JSON: what two
parsers could read in two ways is refused, and nothing is walked value by value.

While one body is parsed the running streams of the process wait, so the work is done in C: depth
and number of its objects and arrays are counted in what is left of the text outside its strings,
before any of them is made; the decoder is strict about UTF-8, numbers and surrogates; doubled keys
show as entries that are missing afterwards. 100,000 numbers take 2 ms (a walk over them: 18 ms).
Only a small body that is refused is read a second time, slowly, to say why.

A document becomes a typed struct (`typed`): msgspec checks types and bounds, and a breach is an
InvalidRequest that names the field, the value and what is allowed. Unknown fields are ignored."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Iterator
from itertools import accumulate, islice
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
from msgspec import Meta

from headrace.base.errors import InvalidRequest, TooLarge, UnsupportedMedia
from headrace.base.optional import available, require
from headrace.front.server.http.auth import check_content_type
from headrace.front.server.http.body_budget import FREE_BYTES, WAIT_S, BodyTimeout, check_rate
from headrace.front.server.http.slow_json import read_slowly

if TYPE_CHECKING:
    from starlette.requests import Request

    from headrace.base.config.resolved import ServerSpec
    from headrace.front.server.http.body_checks import BodyChecks

log = logging.getLogger(__name__)
THREAD_BYTES = 256 * 1024  # from here on a body is parsed in a thread (some 2 ms)
MAX_GZIP_MEMBERS = 64


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


class RoomTaker(Protocol):
    """Takes room for a body of so many bytes, beyond FREE_BYTES, or raises an OverloadError."""

    def __call__(self, num_bytes: int, *, wait_s: float) -> Awaitable[None]:
        """Waits for so long at most."""
        ...


async def read_json(
    request: Request, limits: ServerSpec, room: RoomTaker, checks: BodyChecks
) -> Any:
    """The JSON document in the body; every breach of a limit is the RequestError that names it."""
    check_content_type(request)
    body = await read_body(request, limits, room)
    return await parse_body(body, checks)


async def parse_body(body: bytes | bytearray, checks: BodyChecks) -> Any:
    """`parse_json`; elsewhere where there is much of it."""
    if len(body) < THREAD_BYTES:
        return parse_json(bytes(body))
    return await asyncio.to_thread(checks.read, body)


async def read_body(request: Request, limits: ServerSpec, room: RoomTaker) -> bytearray:
    """The body, within the limits."""
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    max_bytes = limits.max_body_bytes
    if size > max_bytes:
        raise _too_large(max_bytes)
    inflater = _inflater(request.headers.get("content-encoding", "identity"))
    if size > FREE_BYTES:
        await room(size, wait_s=WAIT_S)
    begin, body, received = time.monotonic(), bytearray(), 0
    stream = request.stream()
    while (chunk := await _next_chunk(stream, idle_s=limits.body_timeout_s)) is not None:
        received += len(chunk)
        body += chunk if inflater is None else _inflate(inflater, chunk, room=max_bytes - len(body))
        size = max(received, len(body))
        if size > max_bytes:
            raise _too_large(max_bytes)
        if size > FREE_BYTES:
            # What has been decompressed lies in memory: it does not wait there.
            await room(size, wait_s=WAIT_S if inflater is None else 0.0)
            check_rate(received, time.monotonic() - begin, grace_s=limits.body_timeout_s)
    if inflater is not None and not inflater.finished:
        raise InvalidRequest("the compressed body ends too early")
    return body


async def _next_chunk(stream: AsyncGenerator[bytes, None], *, idle_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(idle_s):
            return await anext(stream, None)
    except TimeoutError:
        raise BodyTimeout(f"the body paused for more than {idle_s:g} s") from None


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


Name = Annotated[str, Meta(max_length=256)]
Keywords = Annotated[dict[str, Any], Meta(max_length=1024)]
"""An object of a field whose keys are a client's: copied key by key as it is read."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
MAX_SHOWN_CHARS = 200
MAX_ENTRIES_TRIED = 4096
R = TypeVar("R", bound=msgspec.Struct)


def typed(document: Any, kind: type[R]) -> R:
    """A request of any dialect: the document with its types and bounds checked; unknown fields are
    ignored."""
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    if log.isEnabledFor(logging.DEBUG):
        ignored = sorted(document.keys() - set(kind.__struct_fields__))
        log.debug("fields that are not known are ignored: %s", [name[:64] for name in ignored[:32]])
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), document, kind) from None


_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_PLACE = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")


def _named(message: str, document: dict[str, Any], kind: type[msgspec.Struct]) -> InvalidRequest:
    match = _WHERE.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix("$")
    if (entry := _wrong_entry(document, path, kind)) is not None:
        return entry
    missing = _MISSING.search(what)
    if missing:
        field = f"{path.removeprefix('.')}.{missing['name']}".strip(".")
        return InvalidRequest(f"{field}: this field is required", field=field)
    field = path.removeprefix(".").replace("[...]", "")
    allowed = what[:1].lower() + what[1:]
    if what.startswith("Invalid enum value") and (words := _words(kind, path)):
        allowed = f"allowed: {', '.join(map(repr, words))}"
    return InvalidRequest(f"{field}: {allowed}; got {_shown(document, path)}", field=field)


def _words(kind: Any, path: str) -> list[Any]:
    """What a field of fixed words may be."""
    forms = [kind]
    for name, _ in _PLACE.findall(path):
        forms = [part for form in forms for part in _parts(form)]
        if name:
            structs = [form for form in forms if name in getattr(form, "__struct_fields__", ())]
            forms = [get_type_hints(form, include_extras=True)[name] for form in structs]
    fixed = [part for form in forms for part in _parts(form) if get_origin(part) is Literal]
    return list(dict.fromkeys(word for form in fixed for word in get_args(form)))


def _parts(form: Any) -> list[Any]:
    """A type, and those that it is put together from."""
    inner = [] if get_origin(form) is Literal else get_args(form)
    return [form, *(part for each in inner for part in _parts(each))]


def _wrong_entry(
    document: dict[str, Any], path: str, kind: type[msgspec.Struct]
) -> InvalidRequest | None:
    """The error of the one entry of an object field that is wrong, which msgspec does not name."""
    field = path.removeprefix(".").removesuffix("[...]")
    entries = document.get(field)
    if not isinstance(entries, dict) or field not in kind.__struct_fields__:
        return None
    form = get_type_hints(kind, include_extras=True)[field]
    for key, value in islice(entries.items(), MAX_ENTRIES_TRIED):
        try:
            msgspec.convert({key: value}, form)
        except msgspec.ValidationError as error:
            at = f"{field}[{key[:64]!r}]"
            match = _WHERE.match(str(error))
            what = match["what"] if match is not None else str(error)
            what = what[:1].lower() + what[1:]
            return InvalidRequest(f"{at}: {what}; got {_shown(value, '')}", field=field)
    return None


def _shown(document: Any, path: str) -> str:
    """The value at `path`, as JSON, cut to 200 characters; a container only by its kind and
    size."""
    value = document
    for name, index in _PLACE.findall(path):
        if isinstance(value, dict) and name:
            value = value.get(name)
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'an array'} with {len(value)} entries"
    if isinstance(value, float) and math.isinf(value):
        return f"a number {'below -' if value < 0 else 'above '}1.8e308"
    text = msgspec.json.encode(value).decode() if not isinstance(value, int) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
