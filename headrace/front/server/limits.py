"""Limits on the body of a request, enforced while the bytes stream in: before decoding, before any other work (P9).

Size (also after decompression), idle time, content type and encoding; the JSON itself is json_body.py's. `KeyShares`
bounds what one key may have in flight.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.requests import Request

from headrace.base.errors import (
    InvalidRequest,
    RateLimited,
    RequestError,
    TooLarge,
    UnsupportedMedia,
)
from headrace.base.optional import available, require
from headrace.front.server.json_body import parse_json

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
    """Members may follow each other (RFC 1952, 2.2); not many, for an empty one costs work and gives nothing."""

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
    """The window is capped, so that a header cannot make the decoder allocate more than the limit of the body."""

    def __init__(self) -> None:
        zstandard: Any = require("zstandard", extra="compression", purpose="a zstd body")
        self._stream = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj()
        self._error: type[Exception] = zstandard.ZstdError

    def feed(self, data: bytes, *, room: int) -> bytes:
        # zstd has no bound on output per call: small pieces bound it (one block gives 128 KiB at most).
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
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia(
            f"content-type {given[:100]!r} is not supported; send application/json"
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


class KeyShares:
    """How many requests each tenant has in flight in this process. Invariant: no tenant is kept at zero."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_flight: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Requests in flight, all tenants."""
        return self._in_flight.total()

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Takes one of the tenant's places; RateLimited when all are taken."""
        if self._in_flight[tenant] >= self.limit:
            raise RateLimited(
                f"this key has {self.limit} requests in flight, its limit; wait for one to end",
                retry_after_s=1.0,
            )
        self._in_flight[tenant] += 1
        try:
            yield
        finally:
            self._in_flight[tenant] -= 1
            if not self._in_flight[tenant]:
                del self._in_flight[tenant]
