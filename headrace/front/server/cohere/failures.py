"""Errors as Cohere's clients read them: a message and the request's id; a stream that had begun
ends with its last event, which says ERROR."""

from __future__ import annotations

import orjson

from headrace.front.server.http.failures import CUT, ID_PLACE, ErrorFormat, Failure


def body(failure: Failure, request_id: str) -> bytes:
    """The JSON document of a failed request."""
    return orjson.dumps({"id": request_id, "message": failure.message})


def last_event(failure: Failure, request_id: str) -> bytes:
    """The end of a stream that failed."""
    delta = {"finish_reason": "ERROR", "error": failure.message}
    data = orjson.dumps({"type": "message-end", "id": request_id, "delta": delta})
    return b"event: message-end\ndata: " + data + b"\n\ndata: [DONE]\n\n"


SHAPE = ErrorFormat(
    body=body, last_words=last_event, cut=last_event(CUT, ID_PLACE.decode()), ping=b": ping\n\n"
)
