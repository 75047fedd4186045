"""multipart/form-data in memory: one small file and some fields, everything bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from headrace.base.config.resolved import ServerSpec
from headrace.base.errors import InvalidRequest, UnsupportedMedia
from headrace.front.server.http.limits import RoomTaker, read_body

MAX_PARTS = 64
MAX_FIELD_BYTES = 64 << 10
MAX_HEADER_BYTES = 8192


@dataclass
class Form:
    """A body's fields, each with all its values in order, and its files by field: name and
    content."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)


async def read_form(request: Request, limits: ServerSpec, room: RoomTaker) -> Form:
    """The form in the body; every breach of a limit is the RequestError that names it."""
    body = await read_body(request, limits, room)
    content_type = request.headers.get("content-type", "")
    return await asyncio.to_thread(lambda: parse_form(content_type, bytes(body)))


def parse_form(content_type: str, body: bytes) -> Form:
    """The form in a body that was read under the server's limits."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise UnsupportedMedia(
            f"content-type {content_type[:100]!r} is not supported; send multipart/form-data"
        )
    parts = _Parts()
    parser = MultipartParser(options[b"boundary"], parts.callbacks())
    try:
        parser.write(body)
    except FormParserError:
        raise InvalidRequest("the body is not valid multipart/form-data") from None
    if not parts.ended:
        raise InvalidRequest("the body ends too early")
    return parts.form


class _Parts:
    """What the parser calls."""

    def __init__(self) -> None:
        self.form, self.ended = Form(), False
        self._num_parts = 0
        self._header = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()
        self._name, self._filename = "", ""

    def callbacks(self) -> Any:
        """By the parser's names."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        self._headers, self._data = {}, bytearray()
        self._name, self._filename = "", ""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = self._bounded(self._header + data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._bounded(self._value + data[start:end])

    @staticmethod
    def _bounded(value: bytes) -> bytes:
        if len(value) > MAX_HEADER_BYTES:
            raise InvalidRequest(f"the headers of a part are longer than {MAX_HEADER_BYTES} bytes")
        return value

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:200]
        self._filename = options.get(b"filename", b"").decode("utf-8", "replace")[:200]

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if not self._filename and len(self._data) > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"{self._name[:50]}: longer than {MAX_FIELD_BYTES} bytes", field=self._name[:50]
            )

    def _end(self) -> None:
        if not self._filename:
            text = self._data.decode("utf-8", "replace")
            self.form.fields.setdefault(self._name.removesuffix("[]"), []).append(text)
        elif self._name in self.form.files:
            raise InvalidRequest(f"{self._name}: one file is allowed", field=self._name)
        else:
            self.form.files[self._name] = (self._filename, bytes(self._data))

    def _all(self) -> None:
        self.ended = True
