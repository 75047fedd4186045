"""`headrace render`: tokenizing, rendering and derendering as a service, with no weights, no GPU
and no torch."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from headrace.base.config.options import CommandLine
from headrace.base.telemetry import log as logs
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.other_servers import translated
from headrace.front.server.render_server import serve_texts, text_services
from headrace.launch.facts import resolve_text
from headrace.launch.listen import address_of, bind


def main(argv: Sequence[str]) -> int:
    """`headrace render [MODEL] [options]`."""
    began = time.monotonic()
    line = CommandLine(
        "headrace render",
        "Tokenize, render and derender over HTTP and gRPC; no weights are read.",
        groups=("model", "server"),
    )
    add_model_argument(line)
    words, notes = translated(argv, line.flags)
    own, options = line.parse(words)
    text, server, _ = resolve_text(with_model(options, own.path))
    logs.configure("render", server.log_level)
    listener = bind(server.host, server.port)
    host = "127.0.0.1" if server.host.startswith("unix:") else server.host
    host = f"[{host}]" if ":" in host else host
    grpc_address = None if server.grpc_port is None else f"{host}:{server.grpc_port}"
    services = text_services(text, server)
    for note in notes:
        print(f"{note.field} {note.requested}: {note.chosen} ({note.why})", flush=True)

    def announce(grpc_port: int | None) -> None:
        seconds = time.monotonic() - began
        if grpc_port is not None:
            print(f"headrace serves gRPC: {host}:{grpc_port}", flush=True)
        address = address_of(listener, scheme="http://" if server.tls is None else "https://")
        print(f"headrace is ready: {address} ({seconds:.2f} s)", flush=True)

    try:
        asyncio.run(serve_texts(services, listener, grpc_address=grpc_address, announce=announce))
    finally:
        listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
