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
import logging
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.types import ASGIApp

from headrace.base import extensions, heap
from headrace.base.affinity import set_affinity
from headrace.base.config.resolved import Decision
from headrace.base.errors import HeadraceError, StartError
from headrace.base.gc_pause import OldGeneration
from headrace.base.telemetry import log as logs
from headrace.front.server.batches.runner import BatchRunner
from headrace.front.server.conversation.context import Services
from headrace.front.server.http.event_loop import watch_event_loop
from headrace.front.server.http.protocol import ConnectionLimits, guarded_protocol
from headrace.front.server.http.stand_in import StandIn
from headrace.front.server.http.stream_guard import StreamGuard
from headrace.front.server.http.tls import ServerCertificates
from headrace.front.server.native.health import stand_in_probes
from headrace.front.server.services import Engine, make_services, open_stores
from headrace.front.server.state.sealing import Sealer, secret_in
from headrace.front.server.table import make_admin_app, make_app
from headrace.launch.api_process import ApiSpec, send_heartbeats
from headrace.launch.topology import DRAIN_SIGNAL, Report, report, tie_to_parent

if TYPE_CHECKING:
    from headrace.front.server.grpc.service import GrpcServer

log = logging.getLogger(__name__)
BACKLOG = 2048
LAST_WORDS_S = 2.0
POLL_S = 0.02
SWITCH_S = 0.0005
COLLECT_PERIOD_S = 1.0


class Server(uvicorn.Server):
    """uvicorn's server with our signals, a drain in place of its shutdown, and a stand-in for its
    loop. Probes over TLS are answered by the loop alone."""

    def __init__(
        self,
        config: uvicorn.Config,
        services: Services,
        guard: StreamGuard,
        certificates: ServerCertificates | None = None,
    ) -> None:
        super().__init__(config)
        self.services, self.guard, self.certificates = services, guard, certificates
        self._stand_in: StandIn | None = None

    def stand_in(self, listener: socket.socket) -> None:
        """From now on probes are answered while the loop is late; called in the loop."""
        services = self.services
        if services.server.tls is not None:
            return
        probes = stand_in_probes(services)
        self._stand_in = StandIn(listener, probes, self, services.metrics, errors=services.errors)
        self._stand_in.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes connections; over TLS, whose handshakes have as long as a request's headers."""
        if self.certificates is None:
            await super().startup(sockets)
            return
        config, loop = self.config, asyncio.get_running_loop()
        protocol: Any = config.http_protocol_class  # uvicorn's signature
        make = partial(
            protocol,
            config=config,
            server_state=self.server_state,
            app_state={},
        )
        self.servers = [
            await loop.create_server(
                make,
                sock=listener,
                ssl=self.certificates.context,
                backlog=config.backlog,
                ssl_handshake_timeout=self.services.server.header_timeout_s,
                ssl_shutdown_timeout=LAST_WORDS_S,
            )
            for listener in sockets or ()
        ]
        self.started = True

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


async def serve(
    spec: ApiSpec,
    listener: socket.socket,
    status: socket.socket,
    *,
    admin: socket.socket | None = None,
    pool: socket.socket | None = None,
) -> None:
    """Serves until the drain is over or the parent is gone."""
    services, engine = make_services(spec, pool)
    names = [place.name for place in spec.models] or [spec.text.model_names[0]]
    services.stores = open_stores("\0".join(sorted(names)), spec.server, services.keys)
    services.config = _described(spec)
    tls = spec.server.tls
    certificates = None if tls is None else ServerCertificates(tls)
    server = http_server(services, make_app(services), certificates=certificates)
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
        asyncio.ensure_future(_collect_when_idle(services)),
    ]
    if services.stores is not None:
        working.append(asyncio.ensure_future(BatchRunner(services, *services.stores).run()))
    if certificates is not None:
        working.append(asyncio.ensure_future(certificates.watch()))
    admin_server = None
    if admin is not None:
        is_file = admin.family == socket.AF_UNIX
        admin_server = http_server(
            services,
            make_admin_app(services),
            certificates=None if is_file else certificates,
        )
        working.append(asyncio.ensure_future(admin_server._serve([admin])))
    services.shut_down = lambda: report(status, Report(stop=True))
    if services.replicas is not None:
        services.replicas.ask = lambda count: report(status, Report(replicas=count))
    remote = await _start_grpc(services)
    server.stand_in(listener)
    server.guard.start()
    try:
        await server._serve([listener])
    finally:
        server.guard.close()
        if remote is not None:
            await remote.stop(LAST_WORDS_S)
        if admin_server is not None:
            admin_server.should_exit = True
        for task in working:
            task.cancel()
        await asyncio.gather(*working, *services.background, return_exceptions=True)
        await _close(services, engine)


def _described(spec: ApiSpec) -> dict[str, object]:
    """What is told of the server's configuration."""
    document: dict[str, object] = msgspec.to_builtins(
        {
            "engine": spec.engine,
            "replicas": 1 if spec.models else spec.replicas or len(spec.socket_paths),
            "max_replicas": 1 if spec.models else len(spec.socket_paths),
            "decisions": [_decision_fields(one) for one in spec.decisions],
        }
    )
    return document


async def _close(services: Services, engine: Engine) -> None:
    """Ends what the services have started."""
    with contextlib.suppress(HeadraceError):
        await engine.close()
    services.template.close()
    services.guest_templates.close()
    services.body_checks.close()
    if services.models is not None:
        await services.models.close()
    if services.media is not None:
        services.media.close()
    if services.store is not None:
        await services.store.close()
    if services.tracer is not None:
        await asyncio.to_thread(services.tracer.close)


async def _collect_when_idle(services: Services) -> None:
    """The garbage collector's long pauses, for ever."""
    old = OldGeneration()
    while True:
        await asyncio.sleep(COLLECT_PERIOD_S)
        old.look(idle=not services.shares.total)


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


def http_server(
    services: Services, app: ASGIApp, *, certificates: ServerCertificates | None = None
) -> Server:
    """The HTTP server over `app`; it speaks TLS if it has certificates."""
    spec = services.server
    limits = ConnectionLimits(
        max_connections=spec.max_connections,
        header_timeout_s=spec.header_timeout_s,
        errors=services.errors,
    )
    guard = StreamGuard()
    config = uvicorn.Config(
        app,
        http=guarded_protocol(limits, services.metrics, guard, is_tls=certificates is not None),
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
    return Server(config, services, guard, certificates)


async def _connect(
    services: Services, engine: Engine, status: socket.socket, server: Server, shared: Path
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
    parser.add_argument("--pool-fd", type=int)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--log-level")
    args = parser.parse_args()
    tie_to_parent(args.parent)
    status = socket.socket(fileno=args.status_fd)
    listener = socket.socket(fileno=args.listen_fd)
    admin = None if args.admin_fd is None else socket.socket(fileno=args.admin_fd)
    pool = None if args.pool_fd is None else socket.socket(fileno=args.pool_fd)
    spec = msgspec.json.decode(Path(args.spec).read_bytes(), type=ApiSpec)
    logs.configure("api", args.log_level or spec.server.log_level)
    extensions.allow(spec.text.extensions)
    if spec.engine is not None:
        set_affinity(spec.engine.device.other_cpus)
    import uvloop

    # Threads of this process tokenize and render; the loop, which streams, shall not wait 5 ms for
    # each of them.
    sys.setswitchinterval(SWITCH_S)
    heap.keep_compact()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(spec, listener, status, admin=admin, pool=pool))
    except StartError as error:
        report(status, Report(error=error.message))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
