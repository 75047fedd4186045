"""Errors as Ollama's clients read them: an object with one text, also as a stream's last line."""

from __future__ import annotations

import orjson

from headrace.front.server.http.failures import CUT, ErrorFormat, Failure
from headrace.front.server.http.line_stream import PING


def body(failure: Failure, _: str) -> bytes:
    """The JSON document of a failed request."""
    return orjson.dumps({"error": failure.message})


def last_line(failure: Failure, request_id: str) -> bytes:
    """The end of a stream that failed."""
    return body(failure, request_id) + b"\n"


SHAPE = ErrorFormat(body=body, last_words=last_line, cut=last_line(CUT, ""), ping=PING)
