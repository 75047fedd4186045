"""`headrace admin COMMAND`: asks a server's admin API (`headrace serve --admin-listen`).

The address comes from --address or HEADRACE_ADMIN, the key from HEADRACE_ADMIN_KEY: keys do not
belong on command lines. Prints the answer as JSON; the exit status is 1 if it was refused.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
from collections.abc import Sequence

from headrace.base import env
from headrace.base.errors import ConfigError, HeadraceError

READS = ("health", "models", "config", "queue", "ledger")
CHANGES = (
    "pause",
    "drain",
    "resume",
    "reload_model",
    "sleep",
    "wake",
    "reset_prefix_cache",
    "profile",
)
TIMEOUT_S = 3600.0


def main(argv: Sequence[str]) -> int:
    """`headrace admin
    health|models|config|queue|ledger|pause|drain|resume|reload_model|sleep|wake|...`."""
    parser = argparse.ArgumentParser(
        prog="headrace admin", description="Ask or change a running server (--admin-listen)."
    )
    parser.add_argument("command", choices=(*READS, *CHANGES, "log_level"))
    parser.add_argument("action", nargs="?", choices=("start", "stop"), help="profile: which")
    parser.add_argument("--address", help="PORT, HOST:PORT or unix:FILE; default: HEADRACE_ADMIN")
    parser.add_argument("--mode", choices=("abort", "wait", "keep"), help="pause, drain, reload")
    parser.add_argument("--model", help="reload_model: folder or GGUF file with the new weights")
    parser.add_argument("--level", help="sleep: 1 or 2; log_level: debug, info, warning, error")
    arguments = parser.parse_args(argv)
    body: dict[str, object] = {}
    for name in ("action", "mode", "model", "level"):
        if getattr(arguments, name) is not None:
            body[name] = getattr(arguments, name)
    if arguments.command == "sleep" and (arguments.level or "").isdecimal():
        body["level"] = int(arguments.level)
    method = "GET" if arguments.command in READS else "POST"
    status, answer = ask(
        _address(arguments.address), method, f"/v1/admin/{arguments.command}", body
    )
    print(json.dumps(answer, indent=2, ensure_ascii=False))
    return 0 if status < 400 else 1


def _address(requested: str | None) -> str:
    address = requested or env.get("HEADRACE_ADMIN")
    if not address:
        raise ConfigError(
            "admin: give --address, or set HEADRACE_ADMIN, as --admin-listen of the server says"
        )
    return address


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(
    address: str, method: str, path: str, body: dict[str, object]
) -> tuple[int, dict[str, object]]:
    """The status and the answer; HeadraceError if nobody answers there."""
    if address.startswith("unix:"):
        connection: http.client.HTTPConnection = _UnixConnection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdecimal()):
            raise ConfigError(
                f"--address: {address!r:.200} given; allowed: PORT, HOST:PORT, unix:FILE"
            )
        connection = http.client.HTTPConnection(host or "127.0.0.1", int(port), timeout=TIMEOUT_S)
    headers = {"content-type": "application/json"}
    if key := env.get("HEADRACE_ADMIN_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        data = json.dumps(body) if method == "POST" else None
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, ValueError) as error:
        raise HeadraceError(f"no answer from the admin API at {address}: {error}") from None
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
