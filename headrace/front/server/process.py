"""The process of one API server: `python -m headrace.front.server.process --spec FILE --listen-fd
N`.

It serves an inherited listening socket. DRAIN_SIGNAL from the supervisor starts the drain:
readiness is false at once, after `pre_drain_s` new requests get 503, running ones finish within
`shutdown_timeout_s`, the rest end with an explicit error; then the process ends with 0. The module
lives in this room because it joins what is above `launch`, which knows it by name only."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.types import ASGIApp

from headrace.base import env, heap
from headrace.base.affinity import set_affinity
from headrace.base.config.resolved import Decision, ServerSpec, TextSpec
from headrace.base.errors import HeadraceError, StartError
from headrace.base.telemetry import log as logs
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import EngineClient
from headrace.front.client.limits import Limits
from headrace.front.client.transcription import Transcriber
from headrace.front.server.app import make_admin_app, make_app
from headrace.front.server.batches.runner import BatchRunner
from headrace.front.server.conversation.context import Services, stream_interval_of
from headrace.front.server.conversation.tracing import Tracer
from headrace.front.server.http.auth import KeyShares, tenant_of
from headrace.front.server.http.body_budget import BodyBudget
from headrace.front.server.http.event_loop import watch_event_loop
from headrace.front.server.http.keys import ApiKeys
from headrace.front.server.http.protocol import ConnectionLimits, guarded_protocol
from headrace.front.server.http.stand_in import StandIn
from headrace.front.server.native.health import stand_in_probes
from headrace.front.server.state.batches import BatchStore
from headrace.front.server.state.database import open_database
from headrace.front.server.state.files import FileStore, private_folder
from headrace.front.server.state.responses import ResponseStore
from headrace.front.server.state.sealing import Sealer, secret_in
from headrace.front.server.table import line_routes
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.templates import TemplateLimits, TemplatePool
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.tokenizer_files import check_vocabulary, load_tokenizer
from headrace.launch.api_process import ApiSpec, send_heartbeats
from headrace.launch.topology import DRAIN_SIGNAL, Report, report, tie_to_parent

if TYPE_CHECKING:
    from headrace.front.media.preparation import MediaPreparer
    from headrace.front.server.grpc.service import GrpcServer

log = logging.getLogger(__name__)
BACKLOG = 2048
LAST_WORDS_S = 2.0
POLL_S = 0.02
SWITCH_S = 0.0005


class Server(uvicorn.Server):
    """uvicorn's server with our signals, a drain in place of its shutdown, and a stand-in for its
    loop."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self.services = services
        self._stand_in: StandIn | None = None

    def stand_in(self, listener: socket.socket) -> None:
        """From now on probes are answered while the loop is late; called in the loop."""
        services = self.services
        probes = stand_in_probes(services)
        self._stand_in = StandIn(listener, probes, self, services.metrics, errors=services.errors)
        self._stand_in.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no connection any more, and ends those that are there."""
        if self._stand_in is not None:
            self._stand_in.stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by the loop."""
        yield

    def begin_drain(self) -> None:
        """First signal: drain. Second: end what runs now."""
        if self.services.leaving:
            self.services.abandon.set()
            return
        self.services.leaving = True
        self._drain = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Waits for load balancers and running generations, ends the rest with an error, then stops
        the server."""
        services = self.services
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(services.abandon.wait(), services.server.pre_drain_s)
        services.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(services.server.shutdown_timeout_s):
                while services.shares.total and not services.abandon.is_set():
                    await asyncio.sleep(POLL_S)
        services.abandon.set()
        self.should_exit = True


MOST_LOGPROBS = 1 << 20
"""Above every vocabulary."""


def make_services(spec: ApiSpec) -> tuple[Services, AsyncLLM]:
    """The services of this process; the engine is not connected yet."""
    text = spec.text
    tokenizer = load_tokenizer(text.tokenizer_path, chat_template=text.chat_template)
    check_vocabulary(tokenizer, text.logits_width)
    most = MOST_LOGPROBS if spec.server.max_logprobs < 0 else spec.server.max_logprobs
    limits = Limits(
        max_n=spec.server.max_n,
        max_logprobs=most,
        max_prompt_logprobs=most,
        heartbeat_timeout_s=spec.heartbeat_timeout_s,
    )
    engine = AsyncLLM(text, spec.socket_paths, limits=limits, tokenizer=tokenizer)
    return services_over(engine, tokenizer, text, spec.server), engine


def services_over(
    engine: EngineClient, tokenizer: Tokenizer, text: TextSpec, server: ServerSpec
) -> Services:
    """The services over any engine."""
    template_limits = TemplateLimits()
    template = ChatTemplate(
        tokenizer.facts.chat_template,
        tokenizer,
        limits=template_limits,
        pool=TemplatePool(template_limits),
        max_tokens=text.max_model_len,
        any_role=server.compat == "vllm",
    )
    return Services(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        guest_templates=TemplatePool(template_limits),
        text=text,
        server=server,
        metrics=Metrics(),
        keys=ApiKeys(server),
        shares=KeyShares.of(server),
        bodies=BodyBudget(server.body_budget_bytes),
        tracer=None
        if server.otlp_endpoint is None
        else Tracer(server.otlp_endpoint, model=text.model_names[0]),
        interval=stream_interval_of(server.stream_interval, server.stream_interval_ms),
        answers=AnswerFormat.named(
            tool_parser=text.tool_parser, reasoning_parser=text.reasoning_parser
        ).bound(tokenizer),
        media=_media(text, tokenizer),
        speech=Transcriber.of(text, tokenizer),
        store=make_store(server),
        line_routes=line_routes(),
    )


def _media(text: TextSpec, tokenizer: Tokenizer) -> MediaPreparer | None:
    """Prepares images and video, if the model takes any: the libraries are imported only then."""
    if text.media is None:
        return None
    from headrace.front.media.preparation import MediaPreparer

    return MediaPreparer(text.media, tokenizer)


def open_stores(
    text: TextSpec, spec: ServerSpec, keys: ApiKeys
) -> tuple[FileStore, BatchStore] | None:
    """Where files and batches are kept: by default a folder for each model, so that none runs
    another's batches."""
    if spec.file_store == "none":
        return None
    folder, named = Path(spec.file_store).expanduser(), "--file-store"
    if spec.file_store == "auto":
        name = text.model_names[0]
        folder = env.cache_dir() / "files" / hashlib.sha256(name.encode()).hexdigest()[:16]
        named = "--file-store auto (a folder in HEADRACE_CACHE_DIR; none: no files are kept)"
    files = FileStore(
        private_folder(folder, named=named) / "files",
        max_bytes=spec.file_store_bytes,
        owners=[tenant_of(digest) for digest in keys.digests] or ("",),
    )
    return files, BatchStore(folder / "batches")


def make_store(spec: ServerSpec) -> ResponseStore | None:
    """The store of responses, not opened yet."""
    if spec.response_store == "off":
        return None
    return ResponseStore(
        open_database(spec.response_store, folder=env.cache_dir()),
        max_bytes=spec.response_store_bytes,
        ttl_s=spec.response_ttl_s,
    )


async def serve(
    spec: ApiSpec,
    listener: socket.socket,
    status: socket.socket,
    admin: socket.socket | None = None,
) -> None:
    """Serves until the drain is over or the parent is gone."""
    services, engine = make_services(spec)
    services.stores = open_stores(spec.text, spec.server, services.keys)
    services.config = msgspec.to_builtins(
        {
            "engine": spec.engine,
            "replicas": len(spec.socket_paths),
            "decisions": [_decision_fields(one) for one in spec.decisions],
        }
    )
    server = http_server(services, make_app(services))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(DRAIN_SIGNAL, server.begin_drain)
    loop.add_reader(status.fileno(), _parent_spoke, status, server)
    shared = Path(spec.socket_paths[0]).with_name("sealing-secret")
    connecting = asyncio.ensure_future(_connect(services, engine, status, server, shared))
    working = [
        connecting,
        asyncio.ensure_future(send_heartbeats(status)),
        asyncio.ensure_future(watch_event_loop(services.metrics, services.loop)),
        asyncio.ensure_future(services.keys.watch()),
    ]
    if services.stores is not None:
        working.append(asyncio.ensure_future(BatchRunner(services, *services.stores).run()))
    admin_server = None
    if admin is not None:
        admin_server = http_server(services, make_admin_app(services))
        working.append(asyncio.ensure_future(admin_server._serve([admin])))
    services.shut_down = lambda: report(status, Report(stop=True))
    remote = await _start_grpc(services)
    server.stand_in(listener)
    try:
        await server._serve([listener])
    finally:
        if remote is not None:
            await remote.stop(LAST_WORDS_S)
        if admin_server is not None:
            admin_server.should_exit = True
        for task in working:
            task.cancel()
        await asyncio.gather(*working, *services.background, return_exceptions=True)
        with contextlib.suppress(HeadraceError):
            await engine.close()
        services.template.close()
        services.guest_templates.close()
        if services.media is not None:
            services.media.close()
        if services.store is not None:
            await services.store.close()
        if services.tracer is not None:
            await asyncio.to_thread(services.tracer.close)


async def _start_grpc(services: Services) -> GrpcServer | None:
    """The gRPC server, if one is wanted: its libraries are imported only then."""
    spec = services.server
    if spec.grpc_port is None:
        return None
    from headrace.front.server.grpc.service import start_grpc

    host = "127.0.0.1" if spec.host.startswith("unix:") else spec.host
    host = f"[{host}]" if ":" in host else host
    return await start_grpc(services, f"{host}:{spec.grpc_port}")


def _decision_fields(decision: Decision) -> dict[str, str]:
    return {
        "field": decision.field,
        "requested": decision.requested,
        "chosen": decision.chosen,
        "why": decision.why,
    }


def http_server(services: Services, app: ASGIApp) -> Server:
    """The HTTP server over `app`."""
    spec = services.server
    limits = ConnectionLimits(
        max_connections=spec.max_connections,
        header_timeout_s=spec.header_timeout_s,
        errors=services.errors,
    )
    config = uvicorn.Config(
        app,
        http=guarded_protocol(limits, services.metrics),
        ws="websockets-sansio",
        ws_max_size=spec.max_body_bytes,
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(spec.keepalive_timeout_s)),
        timeout_graceful_shutdown=round(LAST_WORDS_S),
    )
    return Server(config, services)


async def _connect(
    services: Services, engine: AsyncLLM, status: socket.socket, server: Server, shared: Path
) -> None:
    """Until this is through, readiness is false and generations are answered with 503; then the
    parent is told."""
    services.start_phase = "compiling the chat template"
    try:
        if services.template.source is not None:
            await asyncio.to_thread(services.template.warm_up)
    except HeadraceError as error:
        report(status, Report(error=f"the model's chat template: {error.message}"))
        server.should_exit = True
        return
    services.start_phase = "opening the store of responses"
    try:
        secret = secret_in(shared) if services.store is None else await services.store.start()
    except HeadraceError as error:
        report(status, Report(error=error.message))
        server.should_exit = True
        return
    services.sealer = Sealer(secret)
    services.start_phase = "waiting for the engine to load"
    try:
        await engine.start()
    except HeadraceError as error:
        log.error("no connection to the engine: %s", error.message)
        return
    services.warm = True
    services.start_phase = "started"
    report(status, Report(ready=True))


def _parent_spoke(status: socket.socket, server: Server) -> None:
    """The parent never writes: a readable socket means that it is gone."""
    asyncio.get_running_loop().remove_reader(status.fileno())
    server.services.draining = True
    server.services.abandon.set()
    server.should_exit = True


def main() -> int:
    """Runs the process; 2 if it cannot start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--admin-fd", type=int)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--log-level")
    args = parser.parse_args()
    tie_to_parent(args.parent)
    status = socket.socket(fileno=args.status_fd)
    listener = socket.socket(fileno=args.listen_fd)
    admin = None if args.admin_fd is None else socket.socket(fileno=args.admin_fd)
    spec = msgspec.json.decode(Path(args.spec).read_bytes(), type=ApiSpec)
    logs.configure("api", args.log_level or spec.server.log_level)
    if spec.engine is not None:
        set_affinity(spec.engine.device.other_cpus)
    import uvloop

    # Threads of this process tokenize and render; the loop, which streams, shall not wait 5 ms for
    # each of them.
    sys.setswitchinterval(SWITCH_S)
    heap.keep_compact()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(spec, listener, status, admin))
    except StartError as error:
        report(status, Report(error=error.message))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
