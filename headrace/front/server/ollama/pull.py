"""POST /api/pull: a model of the hub comes into the local cache, as `headrace pull` brings it.

Off unless the server was started with --allow-pull. One comes at a time in a process. A model that
is served is there already. When the client leaves, the download ends between two pieces, and the
next one goes on from there."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

from headrace.base.config.units import show_bytes
from headrace.base.errors import (
    Conflict,
    Forbidden,
    HeadraceError,
    InvalidRequest,
    StartError,
    StorageFull,
)
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.own_names import served_name
from headrace.front.server.conversation.pipeline import streamed
from headrace.front.server.http.limits import typed
from headrace.front.server.http.line_stream import LineStream
from headrace.front.server.http.sse import Chunks
from headrace.front.server.ollama.failures import SHAPE
from headrace.front.server.ollama.models import wanted_name
from headrace.front.server.ollama.schema import OllamaPullRequest
from headrace.launch.hub import Download, fetch, hub_cache, is_hub_id, plan_download

REPORT_S = 0.25
REVISION = "main"
_busy = threading.Lock()
T = TypeVar("T")


async def post_pull(context: RequestContext, document: Any) -> Response:
    """POST /api/pull: progress as lines, the last of which says success."""
    request = typed(document, OllamaPullRequest)
    name = wanted_name(request.model, request.name)
    is_there = served_name(context.services, name) is not None
    if not is_there:
        _check(context, name)
    chunks = _lines(name, is_there=is_there)
    if request.stream is not False:
        return await streamed(context, chunks, shape=SHAPE, kind=LineStream)
    last = b"{}"
    async for line in chunks:
        last = line
    return json_response(orjson.loads(last))


def _check(context: RequestContext, name: str) -> None:
    if not context.services.server.allow_pull:
        raise Forbidden(
            "model: this server fetches no models for its clients (--allow-pull is off)",
            field="model",
        )
    if not is_hub_id(name):
        raise InvalidRequest(
            f"model: {name!r:.200} is not a hub id such as org/name or org/name:TAG", field="model"
        )


async def _lines(name: str, *, is_there: bool) -> Chunks:
    yield _line(status="pulling manifest")
    if not is_there:
        if not _busy.acquire(blocking=False):
            raise Conflict("model: another model is being pulled; try again later", field="model")
        try:
            plan = await asyncio.to_thread(_plan, name)
            progress = _Progress(plan)
            async for line in _fetched(plan, progress):
                yield line
        finally:
            _busy.release()
        yield _line(status="verifying sha256 digest")
    yield _line(status="success")


async def _fetched(plan: Download, progress: _Progress) -> Chunks:
    work = asyncio.ensure_future(asyncio.to_thread(_fetch, plan, progress))
    try:
        while not work.done():
            yield progress.line()
            await asyncio.wait({work}, timeout=REPORT_S)
        work.result()
        yield progress.line()
    finally:
        progress.is_wanted = False
        with suppress(HeadraceError, asyncio.CancelledError):
            await work  # it ends at its next piece


class _Progress:
    """Bytes of a download that have come, counted in the thread that fetches them."""

    is_wanted = True

    def __init__(self, plan: Download) -> None:
        self._plan = plan
        self._completed = 0

    def advance(self, count: int) -> None:
        if not self.is_wanted:
            raise InvalidRequest("nobody waits for this model any more")
        self._completed += count

    def line(self) -> bytes:
        total = self._plan.num_bytes
        return _line(
            status=f"pulling {self._plan.commit[:12]}",
            digest=f"sha1:{self._plan.commit}",
            total=total,
            completed=min(self._completed, total),
        )


def _plan(name: str) -> Download:
    plan = _hub_call(lambda: plan_download(name, REVISION))
    folder = hub_cache()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if plan.num_bytes > free:
        raise StorageFull(
            f"model: {show_bytes(plan.num_bytes)} would come, and {show_bytes(free)} are free",
            field="model",
        )
    return plan


def _fetch(plan: Download, progress: _Progress) -> None:
    _hub_call(lambda: fetch(plan, progress.advance))


def _hub_call(work: Callable[[], T]) -> T:
    """What goes wrong at the hub is told to the client: it named the model."""
    try:
        return work()
    except StartError as error:
        message = error.message.replace("--model ", "model: ", 1)
        raise InvalidRequest(message, field="model") from error


def _line(**fields: Any) -> bytes:
    return orjson.dumps(fields) + b"\n"
