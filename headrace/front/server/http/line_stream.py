"""Answers as lines of JSON (NDJSON): an event stream without its names and comments.

What stands between two lines as a sign of life is a space, which belongs to no value."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.front.server.http.sse import EventStream

PING = b" "
_HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(eq=False)
class LineStream(EventStream):
    """A streaming answer whose events are lines. It has no place for comments."""

    media_type = "application/x-ndjson"

    raw_headers: list[tuple[bytes, bytes]] = field(init=False, default_factory=_HEADERS.copy)

    def __post_init__(self) -> None:
        self.last_comment = None
