"""What a route handler is given: the services of this process and the facts of one HTTP context.

`Services` lives as long as the process, `RequestContext` as long as one request and its answer
(streams included): what a handler enters into `context.held` is given back when the last byte is
out or the client has left.

Where the request's time went is told on demand in the answer and, when it took long, in one log
line (`Timeline`). The parts follow each other and add up to the whole:

    front      reading, checking, template, tokenizing, until the engine has it
    queue      waiting in the engine until first scheduled; `grammar`: what of it a grammar took
    prefill    from then to the first token (all of it for pooled requests)
    decode     from the first token to the last, preemptions included
    delivery   detokenizing, parsing, and waiting for the client to read

A stop string ends an answer in the front, where the engine's own times are not known: its queue is
in `prefill`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace.base.config.resolved import ServerSpec, TextSpec
from headrace.base.config.server_options import ServerSettings
from headrace.base.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.admission_retry import RetryingEngine
from headrace.front.client.events import Ended, EngineClient
from headrace.front.server.conversation.model_choice import HeldModel, ModelChoice
from headrace.front.server.http.auth import KeyShares
from headrace.front.server.http.body_budget import BodyBudget, BodyRoom
from headrace.front.server.http.body_checks import BodyChecks
from headrace.front.server.http.event_loop import LoopSigns
from headrace.front.server.http.failures import OPENAI, VLLM, ErrorFormat
from headrace.front.server.http.keys import ApiKeys
from headrace.front.server.state.batches import BatchStore
from headrace.front.server.state.files import FileStore
from headrace.front.server.state.responses import ResponseStore
from headrace.front.server.state.sealing import SECRET_BYTES, Sealer
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.templates import TemplatePool
from headrace.front.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.front.client.io_processor import IOProcessor
    from headrace.front.client.replicas import Replicas
    from headrace.front.client.transcription import SpeechModel
    from headrace.front.media.prompt_vectors import Preparer
    from headrace.front.server.conversation.tracing import RequestTrace, Tracer


SCOPE_KEY = "headrace.context"
log = logging.getLogger("headrace.requests")


class StreamInterval(msgspec.Struct, frozen=True):
    """How much a delta must hold to go out; None: that bound is never reached."""

    tokens: int | None
    seconds: float | None


def stream_interval_of(tokens: int | None, milliseconds: float | None) -> StreamInterval | None:
    """The interval of these options; None where neither is given."""
    if tokens is None and milliseconds is None:
        return None
    return StreamInterval(tokens, None if milliseconds is None else milliseconds / 1000)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What resolving a request needs to know of this server."""

    names: Sequence[str]
    generation_defaults: Mapping[str, float | int]
    max_n: int
    max_model_len: int
    settings: ServerSettings = field(default_factory=ServerSettings)
    engine: EngineClient | None = None

    def name_of(self, asked: str | None) -> str:
        """The name to answer with, the model's or an adapter's; ModelNotFound lists those that are
        served."""
        if asked is None or asked in self.names:
            return asked or self.names[0]
        adapters = () if self.engine is None else self.engine.adapters
        if asked in adapters:
            return asked
        raise ModelNotFound(
            f"model: {asked[:200]!r} is not served; available: {', '.join((*self.names, *adapters))}",
            field="model",
        )


@dataclass(frozen=True, kw_only=True)
class LineRoute:
    """How a line of a batch is answered: by the handler of its route, with the body that `named`
    makes of it, and with errors in its format (None: as this server writes OpenAI's)."""

    handler: Callable[[RequestContext, Any], Awaitable[Response]]
    named: Callable[[RequestContext, Any], Awaitable[Any]]
    errors: ErrorFormat | None = None


@dataclass(kw_only=True)
class Services:
    """Everything the handlers use.

    `warm`: start-up is over; `start_phase`: what it waits for. `leaving`: load balancers turn away.
    `draining`: no new work. `abandon`: running work must end now; `shut_down`: what SIGTERM does.
    `guest_templates` render those of requests. `answers`: the format of reasoning and tool calls.
    `interval`: what a chunk holds. `sealer`: the same in every API process. `models`: of several;
    these are the default one's, the engine is all's. `replicas`: the cores of one model."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    guest_templates: TemplatePool
    text: TextSpec
    server: ServerSpec
    metrics: Metrics
    keys: ApiKeys
    shares: KeyShares
    bodies: BodyBudget
    body_checks: BodyChecks = field(default_factory=BodyChecks)
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    tracer: Tracer | None = None
    interval: StreamInterval | None = None
    media: Preparer | None = None
    io_processor: IOProcessor | None = None
    speech: SpeechModel | None = None
    config: dict[str, object] = field(default_factory=dict)
    sealer: Sealer = field(default_factory=lambda: Sealer(secrets.token_bytes(SECRET_BYTES)))
    stores: tuple[FileStore, BatchStore] | None = None
    line_routes: Mapping[str, LineRoute] = field(default_factory=dict)
    store: ResponseStore | None = None
    models: ModelChoice | None = None
    replicas: Replicas | None = None
    background: set[asyncio.Task[None]] = field(default_factory=set)
    probe: asyncio.Future[bool] | None = None
    warm: bool = False
    start_phase: str = "starting"
    started_at: float = field(default_factory=time.monotonic)
    leaving: bool = False
    draining: bool = False
    abandon: asyncio.Event = field(default_factory=asyncio.Event)
    loop: LoopSigns = field(default_factory=LoopSigns)
    shut_down: Callable[[], None] = lambda: None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def errors(self) -> ErrorFormat:
        """How errors of OpenAI's routes are written here."""
        return VLLM if self.server.compat == "vllm" else OPENAI

    @property
    def served(self) -> ServedModel:
        """What resolving a request needs to know of this server."""
        return ServedModel(
            names=self.text.model_names,
            generation_defaults=self.text.generation_defaults,
            max_n=self.server.max_n,
            max_model_len=self.text.max_model_len,
            settings=self.server,
            engine=self.engine,
        )

    def model_name(self, asked: str | None) -> str:
        """See `ServedModel.name_of`."""
        return self.served.name_of(asked)

    @property
    def all_names(self) -> list[str]:
        """Every name that requests may give."""
        if self.models is not None:
            return self.models.names
        return [*self.text.model_names, *self.engine.adapters]

    def base_name(self, asked: str | None) -> str:
        """The same of routes that adapters do nothing for."""
        name = self.served.name_of(asked)
        if name not in self.text.model_names:
            raise InvalidRequest(f"model: {name!r} is an adapter; this route takes none")
        return name

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


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request, seconds by part, and what explains them."""

    front_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    delivery_s: float
    end: Ended
    num_prompt: int

    @property
    def total_s(self) -> float:
        """From the arrival to the end of the answer."""
        return self.front_s + self.queue_s + self.prefill_s + self.decode_s + self.delivery_s

    def document(self) -> dict[str, object]:
        """Milliseconds by part, and the counts."""
        parts = ("front", "queue", "prefill", "decode", "delivery", "total")
        document: dict[str, object] = {
            f"{part}_ms": round(1e3 * getattr(self, f"{part}_s"), 3) for part in parts
        }
        for name in ("reason", "num_cached", "num_output", "num_preemptions"):
            document[name] = getattr(self.end, name)
        if self.end.num_drafted:
            document |= {"num_drafted": self.end.num_drafted, "num_accepted": self.end.num_accepted}
        document["grammar_ms"] = round(1e3 * self.end.hook_wait_s, 3)
        return document | {"num_prompt": self.num_prompt}

    def server_timing(self) -> str:
        """The value of a Server-Timing header (W3C)."""
        parts = ("front", "queue", "prefill", "decode", "delivery", "total")
        entries = [f"{part};dur={1e3 * getattr(self, f'{part}_s'):.3f}" for part in parts]
        entries += [
            f'preemptions;desc="{self.end.num_preemptions}"',
            f'cached;desc="{self.end.num_cached}"',
            f'grammar;desc="{1e3 * self.end.hook_wait_s:.3f}"',
        ]
        if self.end.num_drafted:
            entries.append(f'drafts;desc="{self.end.num_accepted}/{self.end.num_drafted}"')
        return ", ".join(entries)


def timeline(
    end: Ended, arrival: float, handed: float, first: float | None, now: float, *, num_prompt: int
) -> Timeline:
    """From the monotonic times of arrival, hand-over, first token seen and end, and what the engine
    told."""
    total, front = now - arrival, handed - arrival
    if end.total_s is not None:
        queue = end.scheduled_s or 0.0
        prefill = (end.total_s if end.first_token_s is None else end.first_token_s) - queue
        decode = end.total_s - queue - prefill
    else:
        queue = 0.0
        prefill = (now if first is None else first) - handed
        decode = 0.0 if first is None else now - first
    return Timeline(
        front_s=front,
        queue_s=queue,
        prefill_s=prefill,
        decode_s=decode,
        delivery_s=max(0.0, total - front - queue - prefill - decode),
        end=end,
        num_prompt=num_prompt,
    )


def log_slow(where: Timeline, request_id: str, *, after_s: float | None) -> None:
    """One structured line for a request that took longer than `after_s` (None: never)."""
    if after_s is not None and where.total_s >= after_s:
        log.info("%s", orjson.dumps({"request": request_id, **where.document()}).decode())


@dataclass(kw_only=True)
class RequestContext:
    """One request and its answer. `arrival` is on the monotonic clock, `timeout_s` what its header
    asked for.

    `timeline` is there once a generation of it has ended; `tells_timing`: its client asked to be
    told. `client_label`: what the body calls the request, sent back as a header; `sent_id`: what
    its X-Request-Id does. `body_bytes`: its size; `body_room`: what its body holds of the budget
    of all bodies. `retrying_engine`: that of many generations. `model_use`: the model that it
    holds, of several. `queued`: a generation of it waits in the engine, and is not refused."""

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
    body_room: BodyRoom | None = None
    timeline: Timeline | None = None
    trace: RequestTrace | None = None
    retrying_engine: RetryingEngine | None = None
    model_use: HeldModel | None = None
    queued: asyncio.Event = field(default_factory=asyncio.Event)

    async def choose_model(self, document: object, *, runs: bool) -> None:
        """In a server of several models: from now on the services are those of the model that this
        body names. `runs`: it is loaded, and stays so until the request is over."""
        if self.services.models is not None:
            await self.services.models.choose(self, document, runs=runs)

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

    def shown_id(self, header: bytes) -> str:
        """The value of an id header: the request's id, but that vLLM's clients get back in
        x-request-id what they sent."""
        echoes = self.services.server.compat == "vllm" and header == b"x-request-id"
        return (self.sent_id if echoes else None) or self.request_id

    async def make_room(self, num_bytes: int, *, wait_s: float) -> None:
        """Takes room for a body of so many bytes, until `body_is_read` or the end of the answer."""
        if self.body_room is None:
            self.body_room = BodyRoom(self.services.bodies, self.tenant)
            self.held.callback(self.body_room.close)
        await self.body_room.grow_to(num_bytes, wait_s=wait_s)

    def body_is_read(self) -> None:
        """Of the body there is nothing left but the prompt's ids: they are the engine's business,
        however long the answer takes."""
        if self.body_room is not None:
            self.body_room.close()

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
