"""What a route handler is given: the services of this process and the facts of one HTTP exchange.

`Services` lives as long as the process, `Exchange` as long as one request and its answer (streams included): what a
handler enters into `exchange.held` is given back when the last byte is out or the client has left.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace.base.config.resolved import ServerSpec, TextSpec
from headrace.base.errors import DeadlineExceeded, ModelNotFound
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.events import Engine
from headrace.front.client.together import PatientEngine
from headrace.front.server.batches.batch import BatchStore
from headrace.front.server.batches.files import FileStore
from headrace.front.server.coalesce import Pace
from headrace.front.server.limits import KeyShares
from headrace.front.server.sealing import SECRET_BYTES, Sealer
from headrace.front.server.state.store import ResponseStore
from headrace.front.server.timing import Timeline, log_slow
from headrace.front.server.tracing import RequestTrace, Tracer
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.template_pool import TemplatePool
from headrace.front.text.tokenizer import Tokenizer

SCOPE_KEY = "headrace.exchange"


@dataclass(kw_only=True)
class Services:
    """Everything the handlers use.

    `warm`: start-up is over. `leaving`: not ready any more, so that load balancers turn away. `draining`: no new work.
    `abandon` is set when running work must end now; `shut_down` asks for what SIGTERM does. Templates that come with
    requests are rendered by `guest_templates`: they cannot hold up the model's own. `answers`: the format of the
    model's reasoning and tool calls. `pace`: what a chunk holds unless a request says so. `sealer` is the same in
    every API process of a server.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    guest_templates: TemplatePool
    text: TextSpec
    server: ServerSpec
    metrics: Metrics
    shares: KeyShares
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    tracer: Tracer | None = None
    pace: Pace | None = None
    config: dict[str, object] = field(default_factory=dict)
    sealer: Sealer = field(default_factory=lambda: Sealer(secrets.token_bytes(SECRET_BYTES)))
    stores: tuple[FileStore, BatchStore] | None = None
    store: ResponseStore | None = None
    background: set[asyncio.Task[None]] = field(default_factory=set)
    probe: asyncio.Future[bool] | None = None
    warm: bool = False
    leaving: bool = False
    draining: bool = False
    abandon: asyncio.Event = field(default_factory=asyncio.Event)
    shut_down: Callable[[], None] = lambda: None
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; ModelNotFound lists the names that are served."""
        names = self.text.model_names
        if asked is None or asked in names:
            return asked or names[0]
        raise ModelNotFound(
            f"model: {asked[:200]!r} is not served; available: {', '.join(names)}", field="model"
        )

    @property
    def ready(self) -> bool:
        """Whether a load balancer should send requests here."""
        gone = self.leaving or self.draining
        return self.warm and self.engine.ready and self.engine.alive and not gone


@dataclass(kw_only=True)
class Exchange:
    """One request and its answer. `arrival` is on the monotonic clock, `timeout_s` what its header asked for.

    `timeline` is there once a generation of it has ended; `tells_timing`: its client asked to be told. `client_label`:
    what the body calls the request, sent back as a header. `crowd`: the engine of a request of many generations.
    """

    services: Services
    request_id: str
    tenant: str = ""
    timeout_s: float | None = None
    arrival: float = field(default_factory=time.monotonic)
    held: ExitStack = field(default_factory=ExitStack)
    tells_timing: bool = False
    client_label: str | None = None
    timeline: Timeline | None = None
    trace: RequestTrace | None = None
    crowd: PatientEngine | None = None

    def timing_comment(self) -> bytes:
        """Where the time went, as a comment in an event stream: parsers pass over it."""
        if self.timeline is None:
            return b""
        return b": timing " + orjson.dumps(self.timeline.document()) + b"\n\n"

    def begin_trace(self, scope: Scope) -> None:
        """Where spans are wanted, the request's begins; of `scope` method, path and headers count."""
        if self.services.tracer is not None:
            self.trace = self.services.tracer.request(scope, self.request_id)

    def over(self, status: int) -> None:
        """The request is over: its spans end, and a slow one is logged."""
        if self.trace is not None:
            self.trace.end(status)
        if self.timeline is not None:
            log_slow(self.timeline, self.request_id, after_s=self.services.server.log_slow_s)

    def hold_place(self) -> None:
        """Takes one of this key's places until the answer is complete; RateLimited when none is left."""
        self.held.enter_context(self.services.shares.hold(self.tenant))

    def deadline_s(self, asked: float | None) -> float:
        """Seconds left of what the body and the header ask for and the server allows, counted from the arrival."""
        limits = (asked, self.timeout_s, self.services.server.request_timeout_s)
        limit = min(each for each in limits if each is not None)
        left = self.arrival + limit - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"not started within {limit:g} s", field="timeout_s")
        return left


def exchange_of(request: Request) -> Exchange:
    """The exchange the shell has put into the scope."""
    found = request.scope[SCOPE_KEY]
    assert isinstance(found, Exchange)
    return found


def json_response(document: object, *, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(document), status_code=status, media_type="application/json")
