"""What each error is called: `type` and `code` by its class, in OpenAI's words and in vLLM's.

The HTTP status and whether a retry helps stand at the class (base/errors.py). OpenAI's names are
the default; under `--compat vllm` the type is vLLM's and `code` repeats the status. An error that
has no row of its own has that of its nearest parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.base.errors import HeadraceError


@dataclass(frozen=True, kw_only=True)
class ErrorNames:
    """A row. `code` None: the error has no code in OpenAI's shape."""

    type: str
    code: str | None
    vllm_type: str


def _row(type_: str, code: str | None, vllm_type: str) -> ErrorNames:
    return ErrorNames(type=type_, code=code, vllm_type=vllm_type)


_BAD = "invalid_request_error"
_FULL = "service_unavailable"
ERROR_NAMES: Mapping[str, ErrorNames] = {
    "HeadraceError": _row("server_error", None, "InternalServerError"),
    "RequestError": _row(_BAD, None, "BadRequestError"),
    "Unsupported": _row(_BAD, "unsupported_feature", "BadRequestError"),
    "ContextTooLong": _row(_BAD, "context_length_exceeded", "BadRequestError"),
    "PreviousResponseNotFound": _row(_BAD, "previous_response_not_found", "BadRequestError"),
    "InvalidStreamId": _row(_BAD, "invalid_stream_id", "BadRequestError"),
    "TooManyLanes": _row(_BAD, "websocket_stream_limit_reached", "BadRequestError"),
    "EmptyAudioBuffer": _row(_BAD, "input_audio_buffer_commit_empty", "BadRequestError"),
    "ModelNotChosen": _row(_BAD, "model_not_validated", "BadRequestError"),
    "Unauthorized": _row("authentication_error", "invalid_api_key", "Unauthorized"),
    "Forbidden": _row("permission_error", None, "Forbidden"),
    "NotFound": _row("not_found_error", None, "NotFoundError"),
    "ModelNotFound": _row("not_found_error", "model_not_found", "NotFoundError"),
    "MethodNotAllowed": _row(_BAD, None, "Method Not Allowed"),
    "HeaderTimeout": _row(_BAD, None, "Request Timeout"),
    "DrainTimeout": _row("timeout", "drain_timeout", "Request Timeout"),
    "Conflict": _row("conflict", None, "Conflict"),
    "TooLarge": _row(_BAD, "request_too_large", "Request Entity Too Large"),
    "UnsupportedMedia": _row(_BAD, None, "Unsupported Media Type"),
    "HeadersTooLarge": _row(_BAD, None, "Request Header Fields Too Large"),
    "NotServed": _row(_BAD, None, "NotImplementedError"),
    "DeadlineExceeded": _row("timeout", "deadline_exceeded", "Gateway Timeout"),
    "OverloadError": _row(_FULL, None, "Service Unavailable"),
    "RateLimited": _row("rate_limit_error", "rate_limit_exceeded", "Too Many Requests"),
    "ConcurrentRequest": _row("rate_limit_error", "concurrent_request", "Too Many Requests"),
    "Unavailable": _row(_FULL, "server_overloaded", "Service Unavailable"),
    "StorageFull": _row(_FULL, "insufficient_storage", "Insufficient Storage"),
    "NonFiniteLogits": _row("server_error", "nan_logits", "InternalServerError"),
    "EngineDead": _row("server_error", "engine_dead", "InternalServerError"),
}


def names_of(kind: type[HeadraceError]) -> ErrorNames:
    """The names of errors of this class."""
    return next(row for each in kind.__mro__ if (row := ERROR_NAMES.get(each.__name__)))
