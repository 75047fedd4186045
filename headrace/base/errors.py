"""Every error headrace raises on purpose, as one tree.

    HeadraceError
    |-- RequestError            the caller of a request did something wrong; never retried unchanged
    |   |-- InvalidRequest      400  malformed, out of range, or can never fit
    |   |   |-- Unsupported     400  known from other servers, and not built here
    |   |   `-- ContextTooLong  400  the prompt is longer than the model or the KV pool can hold
    |   |-- Unauthorized        401
    |   |-- Forbidden           403
    |   |-- NotFound            404
    |   |-- Conflict            409
    |   |-- TooLarge            413
    |   |-- UnsupportedMedia    415
    |   |-- NotServed           501  this server has no part that could do it
    |   `-- DeadlineExceeded    504  the request's own deadline passed
    |-- OverloadError           a retry later may succeed; carries Retry-After
    |   |-- RateLimited         429  this key's share is used up
    |   |-- Unavailable         503  full, draining, paused or restarting
    |   |   |-- QueueFull       503  no place in the queue; nothing else is wrong
    |   |   `-- MediaGone       503  content that was not sent again is not there any more
    |   `-- StorageFull         507  the disk has no room for what is to be kept
    |-- EngineError             500  ours: the request failed through no fault of the caller
    |   |-- NonFiniteLogits     500  the model produced NaN or Inf for this row
    |   `-- EngineDead          500  the process that ran the request died
    `-- StartError              wrong options, checkpoint or machine; exit status 2, no HTTP
        |-- ConfigError
        |-- CheckpointError
        `-- MissingDependency

A message says what was given, what is allowed and what to do, with the field as the user typed it.
It never holds file system paths of the server (StartError excepted: its reader owns the machine),
addresses or other users' data.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class HeadraceError(Exception):
    """Base of every error raised on purpose.

    `status` is the HTTP status, `retryable` says whether the same request may succeed later.
    `field` names the offending field as the caller typed it. What an error is called in an
    answer stands in front/server/http/error_names.py.
    """

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class RequestError(HeadraceError):
    """The caller did something wrong; the same request fails again."""

    status = 400


class InvalidRequest(RequestError):
    """A field is malformed, out of range, or asks for what can never be done."""


class Unsupported(InvalidRequest):
    """The route is known from other servers, and what it asks for is not built here; the message
    names it."""


class ContextTooLong(InvalidRequest):
    """The prompt exceeds the context or the KV pool; the message carries both numbers."""


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status = 401


class Forbidden(RequestError):
    """The key is right but not for this route."""

    status = 403


class NotFound(RequestError):
    """Unknown route, model or request id."""

    status = 404


class ModelNotFound(NotFound):
    """The `model` field names none that is served."""


class MethodNotAllowed(RequestError):
    """The route exists with other methods."""

    status = 405


class DrainTimeout(RequestError):
    """What ran has not ended in the time that was given; nothing was changed."""

    status = 408


class Conflict(RequestError):
    """The state of the server forbids this now and a repetition would not help."""

    status = 409


class TooLarge(RequestError):
    """The body is larger than the limit."""

    status = 413


class UnsupportedMedia(RequestError):
    """A content type or content encoding that is not accepted."""

    status = 415


class NotServed(RequestError):
    """The route exists, and what it needs is not part of this server."""

    status = 501


class HeadersTooLarge(RequestError):
    """Too many headers, or too many bytes of them."""

    status = 431


class DeadlineExceeded(RequestError):
    """The deadline the request carried has passed."""

    status = 504


class OverloadError(HeadraceError):
    """Nothing is wrong with the request; the server cannot take it now. Always answered with
    Retry-After."""

    status = 503
    retryable = True


class RateLimited(OverloadError):
    """This key has used its share."""

    status = 429


class Unavailable(OverloadError):
    """Queue full, draining, or the engine restarts."""


class QueueFull(Unavailable):
    """No place in the queue: one is free as soon as another request moves on."""


class MediaGone(Unavailable):
    """An engine core does not have the content of an image, video or sound that was not sent with
    it again; whoever sent the request sends it with its content."""


class StorageFull(OverloadError):
    """The disk has no room for what is to be kept."""

    status = 507


class EngineError(HeadraceError):
    """The request failed inside the engine."""


class NonFiniteLogits(EngineError):
    """The model produced NaN or Inf for this request's row; only this request fails."""


class EngineDead(EngineError):
    """The engine process died while it ran the request."""

    retryable = True


class StartError(HeadraceError):
    """The server cannot start; printed without a traceback, exit status 2."""


class ConfigError(StartError):
    """An option, or a combination of options, is wrong."""


class CheckpointError(StartError):
    """The checkpoint is broken, incomplete, unsafe or unsupported; names file and tensor or key."""


class MissingDependency(StartError):
    """An optional library is needed and absent; says what to install."""


class WireError(msgspec.Struct, frozen=True):
    """A HeadraceError on its way through a process border: class name, message, field, seconds to
    wait."""

    kind: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None


def _all_errors(root: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    errors = {root.__name__: root}
    for child in root.__subclasses__():
        errors.update(_all_errors(child))
    return errors


def to_wire(error: BaseException) -> WireError:
    """The wire form of any exception; a foreign one becomes an EngineError without its text."""
    if isinstance(error, HeadraceError):
        return WireError(type(error).__name__, error.message, error.field, error.retry_after_s)
    return WireError(EngineError.__name__, f"internal error ({type(error).__name__})")


def from_wire(error: WireError) -> HeadraceError:
    """The exception a WireError stands for; an unknown kind becomes an EngineError."""
    kind = _all_errors(HeadraceError).get(error.kind, EngineError)
    return kind(error.message, field=error.field, retry_after_s=error.retry_after_s)
