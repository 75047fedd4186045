"""`headrace route`: requests to servers that compute prompts and servers that answer them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.base.config.numbers import NumberType
from headrace.base.errors import ConfigError
from headrace.base.telemetry import log as logs
from headrace.launch.listen import address_of, bind


def main(argv: Sequence[str]) -> int:
    """`headrace route --prefill URL --decode URL`."""
    parser = argparse.ArgumentParser(
        prog="headrace route",
        description="Have some servers compute prompts and others answer them; all were started with the same "
        "--kv-transfer-path.",
    )
    for name, what in (("prefill", "compute prompts"), ("decode", "answer them")):
        parser.add_argument(
            f"--{name}", nargs="+", required=True, metavar="URL", help=f"servers that {what}"
        )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    port = NumberType(flag="--port", least=0, greatest=65_535)
    parser.add_argument("--port", type=port, default=8080, help="port; 0 takes a free one [8080]")
    arguments = parser.parse_args(argv)
    urls = {
        name: [_url(name, url) for url in getattr(arguments, name)]
        for name in ("prefill", "decode")
    }
    logs.configure("route", "info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request otherwise
    listener = bind(arguments.host, arguments.port)

    import uvicorn  # a fifth of a second, behind what may be wrong

    from headrace.front.server.router import PromptRouter, Upstream, routing_app

    prefill, decode = ([Upstream(url) for url in urls[name]] for name in ("prefill", "decode"))
    router = PromptRouter(prefill, decode)
    config = uvicorn.Config(
        routing_app(router), log_config=None, access_log=False, lifespan="off", server_header=False
    )
    print(f"headrace routes: {address_of(listener)}", flush=True)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
    return 0


def _url(option: str, text: str) -> str:
    parts = urlsplit(text if "//" in text else f"http://{text}")
    try:
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_plain = False
    if not is_plain or parts.query or parts.fragment:
        raise ConfigError(
            f"--{option}: {text!r:.200} is no address of a server: http://HOST:PORT is one",
            field=option,
        )
    return parts.geturl().rstrip("/")
