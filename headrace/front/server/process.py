"""The process of one API server: `python -m headrace.front.server.process --spec FILE --listen-fd N`.

It serves an inherited listening socket. DRAIN_SIGNAL from the supervisor starts the drain: readiness is false at once,
new requests get 503, running ones finish within `shutdown_timeout_s`, the rest end with an explicit error; then the
process ends with 0. The module lives in this room because it joins what is above `launch`, which knows it by name only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn

from headrace.base.errors import HeadraceError, StartError
from headrace.base.telemetry import log as logs
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.limits import Limits
from headrace.front.server.app import make_app
from headrace.front.server.exchange import Services
from headrace.front.server.limits import KeyShares
from headrace.front.server.protocol import ConnectionLimits, guarded_protocol
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.template_pool import TemplateLimits, TemplatePool
from headrace.front.text.tokenizer import load_tokenizer
from headrace.launch.api_process import ApiSpec
from headrace.launch.topology import DRAIN_SIGNAL, Report, report, tie_to_parent

log = logging.getLogger(__name__)
BACKLOG = 2048
LAST_WORDS_S = 2.0
POLL_S = 0.02


class Server(uvicorn.Server):
    """uvicorn's server with our signals, and a drain in place of its shutdown."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self.services = services

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by the loop."""
        yield

    def begin_drain(self) -> None:
        """First signal: drain. Second: end what runs now."""
        if self.services.draining:
            self.services.abandon.set()
            return
        self.services.draining = True
        self._drain = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Waits for running generations, ends the rest with an error, then stops the server."""
        services = self.services
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(services.server.shutdown_timeout_s):
                while services.shares.total and not services.abandon.is_set():
                    await asyncio.sleep(POLL_S)
        services.abandon.set()
        self.should_exit = True


def make_services(spec: ApiSpec) -> tuple[Services, AsyncLLM]:
    """The services of this process; the engine is not connected yet."""
    text = spec.text
    tokenizer = load_tokenizer(text.tokenizer_path, chat_template=text.chat_template)
    limits = Limits(max_n=spec.server.max_n, heartbeat_timeout_s=spec.heartbeat_timeout_s)
    engine = AsyncLLM(text, spec.socket_paths, limits=limits, tokenizer=tokenizer)
    template_limits = TemplateLimits()
    pool = TemplatePool(template_limits)
    template = ChatTemplate(
        *(tokenizer.facts.chat_template, tokenizer),
        limits=template_limits,
        pool=pool,
        max_tokens=text.max_model_len,
    )
    services = Services(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        guest_templates=TemplatePool(template_limits),
        text=text,
        server=spec.server,
        metrics=Metrics(),
        shares=KeyShares(spec.server.max_requests_per_key),
        answers=AnswerFormat.named(
            tool_parser=text.tool_parser, reasoning_parser=text.reasoning_parser
        ).bound(tokenizer),
    )
    return services, engine


async def serve(spec: ApiSpec, listener: socket.socket, status: socket.socket) -> None:
    """Serves until the drain is over or the parent is gone."""
    services, engine = make_services(spec)
    limits = ConnectionLimits(
        max_connections=spec.server.max_connections, header_timeout_s=spec.server.header_timeout_s
    )
    config = uvicorn.Config(
        make_app(services),
        http=guarded_protocol(limits, services.metrics),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(spec.server.keepalive_timeout_s)),
        timeout_graceful_shutdown=round(LAST_WORDS_S),
    )
    server = Server(config, services)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(DRAIN_SIGNAL, server.begin_drain)
    loop.add_reader(status.fileno(), _parent_spoke, status, server)
    connecting = asyncio.ensure_future(_connect(services, engine, status, server))
    try:
        await server._serve([listener])
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        with contextlib.suppress(HeadraceError):
            await engine.close()
        services.template.close()
        services.guest_templates.close()


async def _connect(
    services: Services, engine: AsyncLLM, status: socket.socket, server: Server
) -> None:
    """Until this is through, readiness is false and generations are answered with 503; then the parent is told."""
    try:
        if services.template.source is not None:
            await asyncio.to_thread(services.template.warm_up)
    except HeadraceError as error:
        report(status, Report(error=f"the model's chat template: {error.message}"))
        server.should_exit = True
        return
    try:
        await engine.start()
    except HeadraceError as error:
        log.error("no connection to the engine: %s", error.message)
        return
    services.warm = True
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
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args()
    tie_to_parent(given.parent)
    status = socket.socket(fileno=given.status_fd)
    listener = socket.socket(fileno=given.listen_fd)
    spec = msgspec.json.decode(Path(given.spec).read_bytes(), type=ApiSpec)
    logs.configure("api", spec.server.log_level)
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(spec, listener, status))
    except StartError as error:
        report(status, Report(error=error.message))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
