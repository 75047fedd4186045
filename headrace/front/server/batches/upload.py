"""multipart/form-data as it arrives: the file goes to the store piece by piece; everything is
bounded."""

from __future__ import annotations

import asyncio
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from headrace.base.errors import DeadlineExceeded, InvalidRequest, UnsupportedMedia
from headrace.front.server.http.paging import number
from headrace.front.server.state.files import FileInfo, FileStore, Upload, checked_filename

MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
MAX_HEADER_BYTES = 8192
MAX_EXPIRY_S = 30 * 86_400
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")


async def receive_file(
    request: Request, store: FileStore, owner: str, *, idle_s: float
) -> FileInfo:
    """The one file of an upload, stored; its fields are checked."""
    boundary = _boundary(request.headers.get("content-type", ""))
    upload = await asyncio.to_thread(store.upload, owner)
    form = _Form(upload)
    try:
        parser = MultipartParser(boundary, form.callbacks())
        stream = request.stream()
        while True:
            try:
                chunk = await asyncio.wait_for(anext(stream, None), idle_s)
            except TimeoutError:
                raise DeadlineExceeded(f"the body paused for more than {idle_s:g} s") from None
            if chunk is None:
                break
            try:
                parser.write(chunk)
            except FormParserError:
                raise InvalidRequest("the body is not valid multipart/form-data") from None
        return await asyncio.to_thread(form.finish)  # looks through the whole folder
    except BaseException:
        upload.cancel()
        raise


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise UnsupportedMedia(
            f"content-type {content_type[:100]!r} is not supported; send multipart/form-data"
        )
    boundary: bytes = options[b"boundary"]
    return boundary


class _Form:
    """The parts of one body. The part named `file` is written through, the others are small
    texts."""

    def __init__(self, upload: Upload) -> None:
        self.fields: dict[str, str] = {}
        self._upload = upload
        self._filename: str | None = None
        self._num_parts = 0
        self._header = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._value = b""
        self._name = ""
        self._data = b""
        self._ended = False

    def callbacks(self) -> Any:
        """What the parser calls."""
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def finish(self) -> FileInfo:
        """The stored file; InvalidRequest where something is missing or wrong."""
        if not self._ended:
            raise InvalidRequest("the body ends too early")
        if self._filename is None:
            raise InvalidRequest("file: this field is required", field="file")
        purpose = self.fields.get("purpose", "")
        if purpose not in PURPOSES:
            raise InvalidRequest(
                f"purpose: {purpose[:50]!r} given; allowed: {', '.join(PURPOSES)}", field="purpose"
            )
        return self._upload.finish(
            filename=self._filename, purpose=purpose, expires_s=self._expiry()
        )

    def _expiry(self) -> int | None:
        value = self.fields.get("expires_after[seconds]")
        if value is None:
            return None
        return number(value, "expires_after[seconds]", least=3600, most=MAX_EXPIRY_S)

    def _part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        self._headers, self._header_bytes, self._data = {}, 0, b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += self._bounded(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._bounded(data[start:end])

    def _bounded(self, piece: bytes) -> bytes:
        self._header_bytes += len(piece)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise InvalidRequest(f"the headers of a part are longer than {MAX_HEADER_BYTES} bytes")
        return piece

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self._filename is not None:
                raise InvalidRequest("file: one file is allowed in a request", field="file")
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._filename = checked_filename(filename or "upload")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._name == "file":
            self._upload.write(piece)
            return
        if len(self._data) + len(piece) > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"{self._name[:50]}: longer than {MAX_FIELD_BYTES} bytes", field=self._name[:50]
            )
        self._data += piece

    def _part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._data.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True
