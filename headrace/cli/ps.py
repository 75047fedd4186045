"""`headrace ps`: the models of a running server, and what becomes of each."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.base import env
from headrace.base.config.units import show_bytes
from headrace.base.errors import HeadraceError
from headrace.cli.server_place import ServerPlace, add_place

ADDRESS = "127.0.0.1:8000"


def main(argv: Sequence[str]) -> int:
    """Prints a row for each model; the exit status is 1 if no server answers."""
    parser = argparse.ArgumentParser(
        prog="headrace ps", description="Show the models of a running server."
    )
    add_place(parser, ADDRESS)
    place = place_of(parser.parse_args(argv))
    table = Table("name", "status", "memory", "until", box=None, pad_edge=False)
    for card in cards(place):
        table.add_row(card["id"], *_described(card))
    Console().print(table)
    return 0


def place_of(arguments: argparse.Namespace) -> ServerPlace:
    """Where the API of a server is."""
    return ServerPlace(address=arguments.address or ADDRESS, ca_file=arguments.ca_file)


def cards(place: ServerPlace) -> list[dict[str, Any]]:
    """GET /v1/models of the server there."""
    document: Any = asked(place, "GET", "/v1/models", {})
    listed: list[dict[str, Any]] = document["data"]
    return listed


def asked(place: ServerPlace, method: str, path: str, body: dict[str, object]) -> dict[str, object]:
    """The answer of a server's API, with the first key of HEADRACE_API_KEYS; HeadraceError if it
    refuses."""
    keys = env.get("HEADRACE_API_KEYS")
    key = keys.split(",")[0] if keys else None
    status, answer = place.ask(method, path, body, key=key)
    if status >= 400:
        error: Any = answer.get("error", {})
        raise HeadraceError(str(error.get("message", answer)))
    return answer


def _described(card: dict[str, Any]) -> tuple[str, str, str]:
    """Status, memory and the end of its keep_alive; of a server of one model it is loaded."""
    status = card.get("status")
    if status is None:
        return "loaded", "", "the server ends"
    words = status["value"] + (f" ({status['why']})" if status["why"] else "")
    if status["value"] != "loaded":
        return words, "", f"{card['num_waiting']} wait" if card["num_waiting"] else ""
    until = "pinned" if card["pinned"] else "in use" if card["in_use"] else "its memory is wanted"
    if card["expires_at"] is not None:
        until = f"{max(0.0, card['expires_at'] - time.time()):.0f} s from now"
    return words, show_bytes(card["num_bytes"]), until
