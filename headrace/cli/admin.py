"""`headrace admin OPERATION`: asks a server's admin API (`headrace serve --admin-listen`). The
operations and their options are those of the server's table.

The address comes from --address or HEADRACE_ADMIN, the key from HEADRACE_ADMIN_KEY: keys do not
belong on command lines. Prints the answer as JSON; the exit status is 1 if it was refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from urllib.parse import quote

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.cli.server_place import ServerPlace, add_place
from headrace.front.server.administration.operations import OPERATIONS, PREFIX, Operation
from headrace.front.server.administration.parameters import Parameter, parameters_of


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
    place = ServerPlace(address=_address(arguments.address), ca_file=arguments.ca_file)
    status, answer = place.ask(operation.method, path, fields, key=key)
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
        add_place(command, "HEADRACE_ADMIN")
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
