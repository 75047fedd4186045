"""Errors on their way out: status, headers and body, cleaned of everything internal.

One function turns any exception into a `Failure`; the HTTP answer and the error event of a stream
both come from it, in the `ErrorFormat` of the dialect that was spoken. An exception that is not
ours is logged with its traceback under the request id and answered as a bare 500."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from starlette.exceptions import HTTPException

from headrace.base.errors import (
    EngineError,
    HeadraceError,
    MethodNotAllowed,
    NotFound,
    OverloadError,
    RequestError,
    Unauthorized,
    Unavailable,
)
from headrace.front.server.http.error_names import ERROR_NAMES, names_of

MAX_MESSAGE_CHARS = 1000


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


_PATH = re.compile(r"(?<![\w/.:])/(?:[\w.+-]+/)+[\w.+-]*")


_ROUTES = re.compile(r"/v1/[\w/.-]*")


_TOO_LONG = re.compile(
    r"(?P<what>\S+) is too long: (?P<given>\d+) tokens > (?P<most>\d+) maximum"
    r"(?: \(the context is (?P<context>\d+)\))?(?P<more>.*)"
)


log = logging.getLogger(__name__)


ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What is no failure, but ends the task or the process. All else that is raised over a request is
its failure: a panic of a library in Rust too, which is no Exception."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error as the client sees it; `type` and `code` are OpenAI's, `vllm_type` is vLLM's."""

    status: int
    type: str
    message: str
    field: str | None
    code: str | None
    vllm_type: str
    retryable: bool
    retry_after_s: float | None
    allow: str | None = None

    @property
    def openai_message(self) -> str:
        """The message in OpenAI's words, by which clients of that dialect know a prompt that is too
        long. (Those of Anthropic's know it by ours.)"""
        too_long = ERROR_NAMES["ContextTooLong"].code
        match = _TOO_LONG.match(self.message) if self.code == too_long else None
        if match is None:
            return self.message
        return (
            f"This model's maximum context length is {match['context'] or match['most']} tokens. "
            f"However, your {match['what']} has {match['given']} tokens{match['more']}. "
            "Please shorten it."
        )

    def body(self) -> bytes:
        """The JSON document in OpenAI's shape; also the data of a stream's error event."""
        return self._document(self.type, self.code)

    def vllm_body(self) -> bytes:
        """The JSON document in vLLM's shape: its type, and the status as code."""
        if self.status == Unauthorized.status:
            return orjson.dumps({"error": self.vllm_type})
        return self._document(self.vllm_type, self.status)

    def _document(self, kind: str, code: str | int | None) -> bytes:
        error = {"message": self.openai_message, "type": kind, "param": self.field, "code": code}
        return orjson.dumps({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """x-should-retry on every error, Retry-After where waiting helps (the SDKs obey both),
        Allow with 405."""
        headers = [(b"x-should-retry", b"true" if self.retryable else b"false")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(self.retry_after_s))).encode()))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        return headers


@dataclass(frozen=True, kw_only=True)
class ErrorFormat:
    """How a dialect says what went wrong, and that nothing has happened yet.

    `body` is the JSON document of a failed request, given the failure and the request's id;
    `last_words` what ends a stream that had begun; `cut` is that of one whose process has died,
    where ID_PLACE stands for the request's id; `ping` a sign of life in a stream that waits.
    """

    body: Callable[[Failure, str], bytes]
    last_words: Callable[[Failure, str], bytes]
    cut: bytes
    ping: bytes


def _openai_words(failure: Failure, _: str) -> bytes:
    return b"data: " + failure.body() + b"\n\ndata: [DONE]\n\n"


def _vllm_words(failure: Failure, _: str) -> bytes:
    return b"data: " + failure.vllm_body() + b"\n\ndata: [DONE]\n\n"


def clean(message: str) -> str:
    """A message without addresses, absolute paths and control characters, at most 1000 characters
    long."""
    text = _ADDRESS.sub("<address>", message)
    text = _PATH.sub(lambda m: m[0] if _ROUTES.fullmatch(m[0]) else "<path>", text)
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."


def failure_of(error: BaseException, *, request_id: str) -> Failure:
    """What the client is told about `error`."""
    known = _known(error)
    if known is None:
        log.error("request %s failed inside the server", request_id, exc_info=error)
        known = EngineError("The server had an internal error while it handled the request.")
    elif isinstance(known, EngineError):
        log.error("request %s failed: %s: %s", request_id, type(known).__name__, known.message)
    retry_after_s = known.retry_after_s
    if isinstance(known, OverloadError):
        # Jitter of a quarter spreads the retries of clients that were refused together.
        retry_after_s = (retry_after_s or 1.0) * (1.0 + random.random() / 4)
    names = names_of(type(known))
    return Failure(
        status=known.status,
        type=names.type,
        message=clean(known.message),
        field=known.field,
        code=names.code,
        vllm_type=names.vllm_type,
        retryable=known.retryable,
        retry_after_s=retry_after_s,
        allow=(error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None,
    )


def _known(error: BaseException) -> HeadraceError | None:
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return MethodNotAllowed(f"this method is not allowed here; allowed: {allowed}")
        return NotFound("unknown route")
    if isinstance(error, RequestError | OverloadError | EngineError):
        return error
    return None


ID_PLACE = b"req-of-this-stream"
CUT = failure_of(
    Unavailable("the process that sent this answer has died; the answer is not whole"),
    request_id="",
)
"""What has happened to a stream whose process is gone."""
OPENAI = ErrorFormat(
    body=lambda failure, _: failure.body(),
    last_words=_openai_words,
    cut=_openai_words(CUT, ""),
    ping=b": ping\n\n",
)
VLLM = ErrorFormat(
    body=lambda failure, _: failure.vllm_body(),
    last_words=_vllm_words,
    cut=_vllm_words(CUT, ""),
    ping=OPENAI.ping,
)
