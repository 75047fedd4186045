"""What a route handler is given: the services of this process and the facts of one HTTP context.

`Services` lives as long as the process, `RequestContext` as long as one request and its answer
(streams included): what a handler enters into `context.held` is given back when the last byte is
out or the client has left."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace.base.config.resolved import ServerSpec, TextSpec
from headrace.base.errors import DeadlineExceeded, RateLimited
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.admission_retry import RetryingEngine
from headrace.front.client.events import EngineClient
from headrace.front.server.conversation.resolved import ServedModel, StreamInterval
from headrace.front.server.http.failures import OPENAI, ErrorFormat
from headrace.front.server.http.timing import Timeline, log_slow
from headrace.front.server.http.tracing import RequestTrace, Tracer
from headrace.front.server.state.batches import BatchStore
from headrace.front.server.state.files import FileStore
from headrace.front.server.state.responses import ResponseStore
from headrace.front.server.state.sealing import SECRET_BYTES, Sealer
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.templates import TemplatePool
from headrace.front.text.tokenizer import Tokenizer


class KeyShares:
    """What each tenant has in flight in this process: requests, tokens (prompts and what may follow
    them) and bytes of bodies. A bound of None does not bind. Invariant: no tenant is kept at
    zero."""

    def __init__(
        self, requests: int, *, tokens: int | None = None, bytes: int | None = None
    ) -> None:
        self._limits = {"requests": requests, "tokens": tokens, "bytes": bytes}
        self._in_flight = {unit: Counter[str]() for unit in self._limits}

    @classmethod
    def of(cls, server: ServerSpec) -> KeyShares:
        """This process's part of the server's bounds: connections spread over its processes."""

        def part(limit: int) -> int:
            return max(1, limit // server.api_servers)

        tokens, bytes = server.max_tokens_per_key, server.max_bytes_per_key
        return cls(
            part(server.max_requests_per_key),
            tokens=None if tokens is None else part(tokens),
            bytes=None if bytes is None else part(bytes),
        )

    @property
    def total(self) -> int:
        """Requests in flight, all tenants."""
        return self._in_flight["requests"].total()

    @contextmanager
    def hold(self, tenant: str, unit: str = "requests", amount: int = 1) -> Iterator[None]:
        """Takes so much of the tenant's share; RateLimited where it is not left."""
        limit, in_flight = self._limits[unit], self._in_flight[unit]
        if limit is not None and in_flight[tenant] + amount > limit:
            what = f"{limit} {unit} in flight, its limit"
            if amount > 1:
                what = (
                    f"{in_flight[tenant]} {unit} in flight and asks for {amount}; {limit} allowed"
                )
            raise RateLimited(f"this key has {what}; wait for one to end", retry_after_s=1.0)
        in_flight[tenant] += amount
        try:
            yield
        finally:
            in_flight[tenant] -= amount
            if not in_flight[tenant]:
                del in_flight[tenant]


SCOPE_KEY = "headrace.context"


@dataclass(frozen=True, kw_only=True)
class LineRoute:
    """How a line of a batch is answered: by the handler of its route, with errors in its format."""

    handler: Callable[[RequestContext, Any], Awaitable[Response]]
    errors: ErrorFormat = OPENAI


@dataclass(kw_only=True)
class Services:
    """Everything the handlers use.

    `warm`: start-up is over; `start_phase`: what it waits for until then. `leaving`: not ready any
    more, so that load balancers turn away. `draining`: no new work. `abandon` is set when running
    work must end now; `shut_down` asks for what SIGTERM does. Templates that come with requests
    are rendered by `guest_templates`: they cannot hold up the model's own. `answers`: the format
    of the model's reasoning and tool calls. `interval`: what a chunk holds unless a request says
    so. `sealer` is the same in every API process of a server."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    guest_templates: TemplatePool
    text: TextSpec
    server: ServerSpec
    metrics: Metrics
    shares: KeyShares
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    tracer: Tracer | None = None
    interval: StreamInterval | None = None
    config: dict[str, object] = field(default_factory=dict)
    sealer: Sealer = field(default_factory=lambda: Sealer(secrets.token_bytes(SECRET_BYTES)))
    stores: tuple[FileStore, BatchStore] | None = None
    line_routes: Mapping[str, LineRoute] = field(default_factory=dict)
    store: ResponseStore | None = None
    background: set[asyncio.Task[None]] = field(default_factory=set)
    probe: asyncio.Future[bool] | None = None
    warm: bool = False
    start_phase: str = "starting"
    started_at: float = field(default_factory=time.monotonic)
    leaving: bool = False
    draining: bool = False
    abandon: asyncio.Event = field(default_factory=asyncio.Event)
    shut_down: Callable[[], None] = lambda: None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def served(self) -> ServedModel:
        """What resolving a request needs to know of this server."""
        return ServedModel(
            names=self.text.model_names,
            generation_defaults=self.text.generation_defaults,
            max_n=self.server.max_n,
            max_model_len=self.text.max_model_len,
        )

    def model_name(self, asked: str | None) -> str:
        """See `ServedModel.name_of`."""
        return self.served.name_of(asked)

    @property
    def context_tokens(self) -> int:
        """The most tokens of one request: by the model, and by the pool that really is there."""
        return min(self.text.max_model_len, self.engine.context_tokens)

    @property
    def has_priorities(self) -> bool:
        """Whether the queue orders requests by priority; elsewhere none may be named."""
        engine: Any = self.config.get("engine")
        return bool(engine) and engine["scheduler"]["policy"] == "priority"

    @property
    def ready(self) -> bool:
        """Whether a load balancer should send requests here."""
        gone = self.leaving or self.draining
        return self.warm and self.engine.ready and self.engine.alive and not gone


@dataclass(kw_only=True)
class RequestContext:
    """One request and its answer. `arrival` is on the monotonic clock, `timeout_s` what its header
    asked for.

    `timeline` is there once a generation of it has ended; `tells_timing`: its client asked to be
    told. `client_label`: what the body calls the request, sent back as a header; `sent_id`: what
    its X-Request-Id does. `body_bytes`: its size. `retrying_engine`: the engine of a request of
    many generations."""

    services: Services
    request_id: str
    tenant: str = ""
    timeout_s: float | None = None
    arrival: float = field(default_factory=time.monotonic)
    held: ExitStack = field(default_factory=ExitStack)
    tells_timing: bool = False
    client_label: str | None = None
    sent_id: str | None = None
    body_bytes: int = 0
    timeline: Timeline | None = None
    trace: RequestTrace | None = None
    retrying_engine: RetryingEngine | None = None

    def timing_comment(self) -> bytes:
        """Where the time went, as a comment in an event stream: parsers pass over it."""
        if self.timeline is None:
            return b""
        return b": timing " + orjson.dumps(self.timeline.document()) + b"\n\n"

    def begin_trace(self, scope: Scope) -> None:
        """Where spans are wanted, the request's begins; of `scope` method, path and headers
        count."""
        if self.services.tracer is not None:
            self.trace = self.services.tracer.request(scope, self.request_id)

    def over(self, status: int) -> None:
        """The request is over: its spans end, and a slow one is logged."""
        if self.trace is not None:
            self.trace.end(status)
        if self.timeline is not None:
            log_slow(self.timeline, self.request_id, after_s=self.services.server.log_slow_s)

    @property
    def external_id(self) -> str:
        """The id by which the client knows its request before it has an answer: the one it sent,
        else that of the answer's x-request-id."""
        return self.client_label or self.sent_id or self.request_id

    def hold_place(self) -> None:
        """Takes one of this key's places until the answer is complete; RateLimited when none is
        left."""
        self.hold("requests", 1)
        self.hold("bytes", self.body_bytes)

    def hold(self, unit: str, amount: int) -> None:
        """Takes so many tokens or bytes of this key's share until the answer is complete."""
        self.held.enter_context(self.services.shares.hold(self.tenant, unit, amount))

    def deadline_s(self, asked: float | None) -> float:
        """Seconds left of what the body and the header ask for and the server allows, counted from
        the arrival."""
        limits = (asked, self.timeout_s, self.services.server.request_timeout_s)
        limit = min(each for each in limits if each is not None)
        left = self.arrival + limit - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"not started within {limit:g} s", field="timeout_s")
        return left


def context_of(request: Request) -> RequestContext:
    """The context the shell has put into the scope."""
    context = request.scope[SCOPE_KEY]
    assert isinstance(context, RequestContext)
    return context


def json_response(document: object, *, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(document), status_code=status, media_type="application/json")
