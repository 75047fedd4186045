"""The lines of a batch: one request each in, one answer each out. What the server and `headrace
batch` share.

A line is answered by the handler of its route, as if it had come over HTTP under the owner's key.
While the engine is full the line waits; so only what would fail again is an error."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
import orjson
from msgspec import Meta
from starlette.responses import Response

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest, OverloadError
from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.auth import request_id
from headrace.front.server.http.failures import ENDS, failure_of
from headrace.front.server.http.limits import parse_json
from headrace.front.server.state.batches import LineError

Lines = Iterator[tuple[int, bytes]]
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
"""The routes a line may name. Their handlers are `Services.line_routes`."""
MAX_LINES = 50_000
BATCH_PRIORITY = 100  # behind what people wait for
MAX_ENGINE_TRIES = 3
RETRY_S = 0.5
CLIENT_GONE = 499  # cancelled


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one line: the bytes that stand in the output."""

    custom_id: str
    ok: bool
    written: bytes


def read_line(written: bytes, *, endpoint: str | None) -> Line:
    """One line, checked; `endpoint`: the only route allowed, None for any."""
    line = parse(parse_json(written), Line)
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if line.url not in allowed:
        raise InvalidRequest(
            f"url: {line.url[:80]!r} given; allowed: {', '.join(allowed)}", field="url"
        )
    return line


def check_lines(
    file: BinaryIO, *, endpoint: str | None, max_line_bytes: int, max_errors: int = 100
) -> tuple[int, list[LineError]]:
    """The number of requests in a file, and what is wrong with it (at most `max_errors`)."""
    seen: set[str] = set()
    errors: list[LineError] = []
    for number, written in numbered_lines(file, max_line_bytes=max_line_bytes):
        try:
            if len(written) > max_line_bytes:
                raise InvalidRequest(f"the line is longer than {max_line_bytes} bytes")
            line = read_line(written, endpoint=endpoint)
            if line.custom_id in seen:
                raise InvalidRequest(
                    f"custom_id: {line.custom_id[:80]!r} occurs twice", field="custom_id"
                )
            seen.add(line.custom_id)
            if len(seen) > MAX_LINES:
                raise InvalidRequest(f"the batch has more than {MAX_LINES} requests")
        except InvalidRequest as error:
            errors.append(
                LineError(
                    code="invalid_request", line=number, message=error.message, param=error.field
                )
            )
            if len(errors) >= max_errors or len(seen) > MAX_LINES:
                break
    if not seen and not errors:
        errors.append(LineError(code="empty_file", line=1, message="the file has no requests"))
    return len(seen), errors


def numbered_lines(file: BinaryIO, *, max_line_bytes: int) -> Lines:
    """The lines that are not blank, numbered from 1; of one that is too long the beginning only."""
    number = 0
    while written := file.readline(max_line_bytes + 2):
        number += 1
        if len(written) > max_line_bytes and not written.endswith(b"\n"):
            yield number, written
            return
        if written.strip():
            yield number, written.strip()


async def answer(services: Services, tenant: str, line: Line) -> Answered:
    """The answer to one line; waits while there is no room for it."""
    tries = 0
    while True:
        context = RequestContext(services=services, request_id=request_id(), tenant=tenant)
        context.begin_trace({"method": line.method, "path": line.url, "headers": []})
        try:
            response = await _handled(context, line)
            return _answered(line, context, response.status_code, bytes(response.body))
        except OverloadError as error:
            await asyncio.sleep(min(5.0, error.retry_after_s or RETRY_S))
        except EngineError as error:
            tries += 1
            if tries == MAX_ENGINE_TRIES:
                return _failed(line, context, error)
            await asyncio.sleep(RETRY_S * 2**tries)
        except HeadraceError as error:
            return _failed(line, context, error)
        except ENDS:
            raise
        except BaseException as error:
            return _failed(line, context, error)


async def _handled(context: RequestContext, line: Line) -> Response:
    """One attempt; its trace and its log line end with it, as those of an context over HTTP."""
    body = dict(line.body)
    status = CLIENT_GONE
    try:
        route = context.services.line_routes[line.url]
        body = await route.named(context, body)
        await context.choose_model(body, runs=True)
        if context.services.has_priorities:
            body = {"priority": BATCH_PRIORITY, **body}
        for field in ("stream", "background"):
            if body.get(field):
                raise InvalidRequest(f"{field}: not in a batch", field=field)
        response = await route.handler(context, body)
        status = response.status_code
        return response
    except BaseException as error:
        status = error.status if isinstance(error, HeadraceError) else 500
        raise
    finally:
        context.held.close()
        context.over(status)


def _failed(line: Line, context: RequestContext, error: BaseException) -> Answered:
    failure = failure_of(error, request_id=context.request_id)
    services = context.services
    errors = services.line_routes[line.url].errors or services.errors
    body = errors.body(failure, context.request_id)
    return _answered(line, context, failure.status, body)


def _answered(line: Line, context: RequestContext, status: int, body: bytes) -> Answered:
    document = {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": line.custom_id,
        "response": {
            "status_code": status,
            "request_id": context.request_id,
            "body": orjson.Fragment(body),
        },
        "error": None,
    }
    return Answered(
        custom_id=line.custom_id, ok=status == 200, written=orjson.dumps(document) + b"\n"
    )


async def run_lines(
    services: Services,
    tenant: str,
    file: BinaryIO,
    *,
    endpoint: str | None,
    done: Collection[str],
    at_once: int,
    max_line_bytes: int,
) -> AsyncIterator[Answered]:
    """Answers every line that is not in `done`, `at_once` at a time, in the order in which they
    end."""
    lines = numbered_lines(file, max_line_bytes=max_line_bytes)
    running: set[asyncio.Task[Answered]] = set()
    try:
        over = False
        while running or not over:
            while not over and len(running) < at_once:
                line = await asyncio.to_thread(_next_line, lines, endpoint, done)
                if line is None:
                    over = True
                else:
                    running.add(asyncio.ensure_future(answer(services, tenant, line)))
            if not running:
                return
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _next_line(lines: Lines, endpoint: str | None, done: Collection[str]) -> Line | None:
    for _, written in lines:
        line = read_line(written, endpoint=endpoint)
        if line.custom_id not in done:
            return line
    return None


def answered_ids(path: Path) -> set[str]:
    """The custom_ids that an output file answers; a last line that was cut off is removed from
    it."""
    if not path.exists():
        return set()
    ids: set[str] = set()
    with path.open("r+b") as file:
        whole = 0
        for written in file:
            if not written.endswith(b"\n"):
                break
            whole += len(written)
            ids.add(msgspec.json.decode(written, type=_Id).custom_id)
        file.truncate(whole)
    return ids


class _Id(msgspec.Struct):
    custom_id: str
