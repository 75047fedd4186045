"""Errors as Anthropic's clients read them: the type follows from the status, the request's id
stands in the body."""

from __future__ import annotations

import orjson

from headrace.front.server.http.failures import CUT, ID_PLACE, ErrorFormat, Failure

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def body(failure: Failure, request_id: str) -> bytes:
    """The JSON document of a failed request."""
    kind = _TYPES.get(failure.status, "invalid_request_error")
    error = {"type": kind, "message": failure.message}
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def last_event(failure: Failure, request_id: str) -> bytes:
    """The end of a stream that failed."""
    return b"event: error\ndata: " + body(failure, request_id) + b"\n\n"


SHAPE = ErrorFormat(
    body=body,
    last_words=last_event,
    cut=last_event(CUT, ID_PLACE.decode()),
    ping=b'event: ping\ndata: {"type":"ping"}\n\n',
)
