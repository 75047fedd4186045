"""`headrace admin OPERATION`: asks a server's admin API (`headrace serve --admin-listen`). The
operations and their options are those of the server's table.

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
from urllib.parse import quote

from headrace.base import env
from headrace.base.errors import ConfigError, HeadraceError
from headrace.front.server.administration.operations import OPERATIONS, PREFIX, Operation
from headrace.front.server.administration.parameters import Parameter, parameters_of

TIMEOUT_S = 3600.0


def main(argv: Sequence[str]) -> int:
    """`headrace admin health|models|config|queue|pause|drain|resume|reload_model|sleep|...`."""
    arguments = parser().parse_args(argv)
    operation: Operation = arguments.operation
    fields = {
        parameter.name: getattr(arguments, parameter.name)
        for parameter in parameters_of(operation.parameters)
        if getattr(arguments, parameter.name) is not None
    }
    ids = {name: quote(str(value), safe="") for name, value in fields.items()}
    path = f"{PREFIX}/{(operation.path or operation.name).format(**ids)}"
    key = env.get("HEADRACE_ADMIN_KEY")
    status, answer = ask(_address(arguments.address), operation.method, path, fields, key=key)
    print(json.dumps(answer, indent=2, ensure_ascii=False))
    return 0 if status < 400 else 1


def parser() -> argparse.ArgumentParser:
    """A command for each operation: fields that it needs are words, the others options."""
    whole = argparse.ArgumentParser(
        prog="headrace admin", description="Ask or change a running server (--admin-listen)."
    )
    commands = whole.add_subparsers(metavar="OPERATION", required=True)
    for operation in OPERATIONS:
        summary = operation.doc.partition(". ")[0].rstrip(".")
        command = commands.add_parser(operation.name, help=summary, description=operation.doc)
        command.set_defaults(operation=operation)
        command.add_argument(
            "--address", help="PORT, HOST:PORT or unix:FILE; default: HEADRACE_ADMIN"
        )
        for parameter in parameters_of(operation.parameters):
            _add(command, parameter)
    return whole


def _add(command: argparse.ArgumentParser, parameter: Parameter) -> None:
    """The option of a field; what is not given is left to the server's default."""
    name = parameter.name if parameter.required else "--" + parameter.name.replace("_", "-")
    if parameter.kind is bool:
        command.add_argument(name, action=argparse.BooleanOptionalAction, help=parameter.doc)
        return
    command.add_argument(
        name,
        type=int if parameter.kind is int else str,
        choices=parameter.choices or None,
        nargs="+" if parameter.kind is list else None,
        help=parameter.doc,
    )


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
    address: str, method: str, path: str, body: dict[str, object], *, key: str | None
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
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        data = json.dumps(body) if method == "POST" else None
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, ValueError) as error:
        raise HeadraceError(f"no answer from {address}: {error}") from None
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
