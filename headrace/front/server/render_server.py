"""A server of texts alone: tokenize, render, derender over HTTP and gRPC, with no weights, no
device and no torch.

It is the same application over an engine that generates nothing: whatever needs one is answered
with 501."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence

from headrace.base.config.resolved import ServerSpec, TextSpec
from headrace.base.errors import NotServed
from headrace.front.client.events import Events, Generation
from headrace.front.server.conversation.context import Services
from headrace.front.server.http.tls import ServerCertificates
from headrace.front.server.process import http_server
from headrace.front.server.services import services_over
from headrace.front.server.table import make_app
from headrace.front.text.tokenizer_files import load_tokenizer

_WHY = "this server renders and tokenizes; it runs no model"


class NoEngine:
    """Implements `events.EngineClient` by refusing what needs a model."""

    ready = True
    alive = True
    window = window_tokens = 1
    cached_block_tokens = 0
    trouble = ""
    degraded = False
    stalled = False
    held = ""
    connected = (0, 0)
    weights_version = ""
    adapters: Sequence[str] = ()
    context_tokens = 2**31

    def generate(self, generation: Generation) -> Events:
        """Refused."""
        raise NotServed(_WHY)

    def check_queue(self, deadline_s: float | None = None) -> None:
        """There is no queue."""

    async def explain(self, label: str, *, tenant: str | None = None) -> dict[str, object]:
        """Refused."""
        raise NotServed(_WHY)

    async def call(self, operation: str, **arguments: object) -> list[object]:
        """Management does nothing; there is no core to answer."""
        return []

    async def call_each(self, operation: str, **arguments: object) -> list[object]:
        """As `call`."""
        return []


def text_services(text: TextSpec, server: ServerSpec) -> Services:
    """The services of a server of texts."""
    tokenizer = load_tokenizer(text.tokenizer_path, chat_template=text.chat_template)
    services = services_over(NoEngine(), tokenizer, text, server)
    services.warm = True
    return services


async def serve_texts(
    services: Services,
    listener: socket.socket,
    *,
    grpc_address: str | None,
    announce: Callable[[int | None], None],
) -> None:
    """Serves until SIGTERM or SIGINT; `announce` is called with the gRPC port once requests are
    taken."""
    if services.template.source is not None:
        await asyncio.to_thread(services.template.warm_up)
    tls = services.server.tls
    certificates = None if tls is None else ServerCertificates(tls)
    server = http_server(services, make_app(services), certificates=certificates)
    services.shut_down = server.begin_drain
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.begin_drain)
    remote, port = None, None
    if grpc_address is not None:
        from headrace.front.server.grpc.service import RENDERING, start_grpc

        remote = await start_grpc(services, grpc_address, RENDERING, shares_port=False)
        port = remote.port
    serving = asyncio.ensure_future(server._serve([listener]))
    watching = None if certificates is None else asyncio.ensure_future(certificates.watch())
    announce(port)
    try:
        await serving
    finally:
        if watching is not None:
            watching.cancel()
        if remote is not None:
            await remote.stop(1.0)
        services.template.close()
        services.guest_templates.close()
