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
        "--kv-transfer-path, or those that answer are named with their --kv-transfer-listen behind a =.",
    )
    for name, what in (("prefill", "compute prompts"), ("decode", "answer them")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            required=True,
            metavar="URL" if name == "prefill" else "URL[=HOST:PORT]",
            help=f"servers that {what}",
        )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    port = NumberType(flag="--port", least=0, greatest=65_535)
    parser.add_argument("--port", type=port, default=8080, help="port; 0 takes a free one [8080]")
    arguments = parser.parse_args(argv)
    computing = [_url("prefill", url) for url in arguments.prefill]
    answering = [_url_and_kv(url) for url in arguments.decode]
    logs.configure("route", "info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request otherwise
    listener = bind(arguments.host, arguments.port)

    import uvicorn  # a fifth of a second, behind what may be wrong

    from headrace.front.server.router import PromptRouter, Upstream, routing_app

    decode = [Upstream(url, kv_address=kv_address) for url, kv_address in answering]
    router = PromptRouter([Upstream(url) for url in computing], decode)
    config = uvicorn.Config(
        routing_app(router), log_config=None, access_log=False, lifespan="off", server_header=False
    )
    print(f"headrace routes: {address_of(listener)}", flush=True)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
    return 0


def _url_and_kv(text: str) -> tuple[str, tuple[str, int] | None]:
    """The address of a server that answers, and where KV is pushed to it."""
    url, is_pushed, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if is_pushed and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"--decode: {address!r:.100} is no address of --kv-transfer-listen: HOST:PORT is one",
            field="decode",
        )
    return _url("decode", url), (host, int(port)) if is_pushed else None


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
