"""A router in front of servers that pass the KV of prompts to each other (core/kv_transfers.py):
some compute prompts, others answer them, and each request goes to one of each, with the fewest
others.

It changes nothing else: a body is read as far as its prompt must be sent twice, keys and answers
pass through. A request that the first server cannot serve now is answered by the second alone; one
that it refuses is refused. What has several prompts or answers, and every other route, goes to a
server that answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.base.errors import EngineError, HeadraceError, TooLarge, Unavailable
from headrace.front.server.http.failures import failure_of

log = logging.getLogger(__name__)
PASSING = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"})
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD")
MAX_BODY_BYTES = 64 << 20
CONNECT_S = 5.0
SPARED_S = 5.0
"""So long a server that did not answer gets nothing while another one is there."""
_WHOLE = ("use_beam_search", "best_of", "echo", "prompt_logprobs", "kv_transfer_params")
_UNSENT = ("max_completion_tokens", "min_tokens", "stream_options")
_CONNECTION = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}
    | {"content-length", "proxy-authorization", "proxy-connection", "expect"}
)


class Upstream:
    """A server. `busy`: requests that are there now; `spared_until`: it did not answer lately.
    `kv_address`: host and port at which KV is pushed to it; None: it shares a folder."""

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        kv_address: tuple[str, int] | None = None,
    ) -> None:
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
            follow_redirects=False,
            transport=transport,
        )
        self.url, self.busy, self.spared_until = url, 0, 0.0
        self.kv_address = kv_address

    def request_of(self, request: Request, content: bytes) -> httpx.Request:
        """The same request to this server. The path is put behind its address as it is: one that
        looks like an address of its own names no other server."""
        path, query = request.scope["raw_path"], request.scope["query_string"]
        url = httpx.URL(self.url).copy_with(raw_path=path + (b"?" + query if query else b""))
        headers = _headers(request.headers)
        return self.client.build_request(request.method, url, content=content, headers=headers)

    async def send(self, request: Request, content: bytes) -> httpx.Response:
        """The beginning of its answer. A client that goes away meanwhile takes its request with
        it."""
        sent = self.client.send(self.request_of(request, content), stream=True)
        answer, gone = asyncio.ensure_future(sent), asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()


class PromptRouter:
    """Implements the routes. See the top of the file."""

    def __init__(self, prefill: Sequence[Upstream], decode: Sequence[Upstream]) -> None:
        self._prefill, self._decode = prefill, decode

    async def answer(self, request: Request) -> Response:
        """The answer to any request."""
        try:
            return await self._answer(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    async def _answer(self, request: Request) -> Response:
        content = await _body(request)
        if content is None:
            return _failed(TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes"))
        if request.method == "POST" and request.url.path in PASSING:
            document = _splittable(content)
            if document is not None:
                first = _least_busy(self._decode)
                first.busy += 1
                try:
                    transfer = await self._computed(request, document, first)
                finally:
                    first.busy -= 1
                if isinstance(transfer, Response):
                    return transfer
                if transfer is not None:
                    content = orjson.dumps(document | {"kv_transfer_params": transfer})
                return await self._forward(request, content, first)
        return await self._forward(request, content)

    async def _computed(
        self, request: Request, document: dict[str, Any], answers: Upstream
    ) -> Response | dict[str, Any] | None:
        """What the second server, which `answers`, must know of the prompt that the first one has
        computed; its answer, where it refuses the request; None where it cannot take it now."""
        content = orjson.dumps(_prompt_alone(document, answers))
        upstream = _least_busy(self._prefill)
        upstream.busy += 1
        try:
            reply = await upstream.send(request, content)
            await reply.aread()
        except httpx.HTTPError as error:
            _spare(upstream, error)
            return None
        finally:
            upstream.busy -= 1
        if 400 <= reply.status_code < 500 and reply.status_code != 429:
            headers = _headers(reply.headers)
            headers.pop("content-encoding", None)
            return Response(reply.content, reply.status_code, headers)
        try:
            transfer = reply.json()["kv_transfer_params"] if reply.is_success else None
        except (ValueError, KeyError, TypeError):
            transfer = None
        if not isinstance(transfer, dict):
            log.warning("%s computed no prompt (%d)", upstream.url, reply.status_code)
            return None
        return transfer

    async def _forward(
        self, request: Request, content: bytes, first: Upstream | None = None
    ) -> Response:
        """The answer of a server, of `first` if it can be reached."""
        for _ in self._decode:
            upstream, first = first or _least_busy(self._decode), None
            upstream.busy += 1
            try:
                reply = await upstream.send(request, content)
            except httpx.ConnectError as error:
                upstream.busy -= 1
                _spare(upstream, error)
                continue
            except httpx.HTTPError as error:
                upstream.busy -= 1
                ended = f"{upstream.url} ended the request ({type(error).__name__})"
                return _failed(EngineError(ended), status=502)
            except BaseException:
                upstream.busy -= 1
                raise
            chunks = _chunks(upstream, reply)
            return StreamingResponse(chunks, reply.status_code, _headers(reply.headers))
        return _failed(
            Unavailable("none of the servers that answer can be reached", retry_after_s=SPARED_S)
        )


def routing_app(router: PromptRouter) -> Starlette:
    """The application: all paths are the router's."""
    return Starlette(routes=[Route("/{path:path}", router.answer, methods=list(METHODS))])


async def _chunks(upstream: Upstream, reply: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async for chunk in reply.aiter_raw():
            yield chunk
    finally:
        upstream.busy -= 1
        await reply.aclose()


async def _gone(request: Request) -> None:
    """Returns when the client has gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes | None:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _splittable(content: bytes) -> dict[str, Any] | None:
    """The request, where it is of one prompt with one answer. What is malformed is refused by the
    server that gets it."""
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict) or any(document.get(name) for name in _WHOLE):
        return None
    sampling = document.get("sampling_params")
    counts = document.get("n"), sampling.get("n") if isinstance(sampling, dict) else None
    prompt = document.get("prompt")
    is_one = not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)
    return document if is_one and all(count in (None, 1) for count in counts) else None


def _prompt_alone(document: dict[str, Any], answers: Upstream) -> dict[str, Any]:
    """The request for its prompt: one token, at once."""
    kept = {name: value for name, value in document.items() if name not in _UNSENT}
    params: dict[str, Any] = {"do_remote_decode": True}
    if answers.kv_address is not None:
        params["remote_host"], params["remote_port"] = answers.kv_address
    kept |= {"stream": False, "kv_transfer_params": params}
    sampling = document.get("sampling_params")
    if not isinstance(sampling, dict):
        return kept | {"max_tokens": 1}
    few = {name: value for name, value in sampling.items() if name not in _UNSENT}
    return kept | {"sampling_params": few | {"max_tokens": 1}}


def _least_busy(upstreams: Sequence[Upstream]) -> Upstream:
    now = time.monotonic()
    return min(upstreams, key=lambda one: (one.spared_until > now, one.busy))


def _spare(upstream: Upstream, error: Exception) -> None:
    upstream.spared_until = time.monotonic() + SPARED_S
    log.warning("%s cannot be reached (%s)", upstream.url, type(error).__name__)


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that are not of the connection."""
    return {name: value for name, value in headers.items() if name.lower() not in _CONNECTION}


def _failed(error: HeadraceError, *, status: int | None = None) -> Response:
    failure = failure_of(error, request_id="")
    headers = {name.decode(): value.decode() for name, value in failure.headers()}
    return Response(
        failure.body(), status or failure.status, headers, media_type="application/json"
    )
