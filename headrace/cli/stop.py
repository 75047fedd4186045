"""`headrace stop MODEL`: has a running server unload one of its models."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from headrace.base.errors import HeadraceError
from headrace.cli.ps import ADDRESS, asked, cards, place_of
from headrace.cli.server_place import ServerPlace, add_place

WAIT_S = 30.0
POLL_S = 0.1
LOADED = ("loaded", "falling asleep", "unloading")


def main(argv: Sequence[str]) -> int:
    """Unloads it as a request with keep_alive 0 does: behind the requests that use it."""
    parser = argparse.ArgumentParser(
        prog="headrace stop",
        description="Unload a model of a running server once its requests have ended.",
    )
    parser.add_argument("model", metavar="MODEL")
    add_place(parser, ADDRESS)
    arguments = parser.parse_args(argv)
    model, place = arguments.model, place_of(arguments)
    card = next((card for card in cards(place) if card["id"] == model), None)
    if card is None or "status" not in card:
        why = "is not served there" if card is None else "is the only model of its server"
        raise HeadraceError(f"{model} {why}")
    if card["pinned"]:
        raise HeadraceError(f"{model} is pinned; POST /models/unload with the admin key unloads it")
    asked(place, "POST", "/tokenize", {"model": model, "prompt": "", "keep_alive": 0})
    end = time.monotonic() + WAIT_S
    while _status(place, model) in LOADED:
        if time.monotonic() > end:
            raise HeadraceError(f"{model} is still in use after {WAIT_S:g} s; it will be unloaded")
        time.sleep(POLL_S)
    print(f"{model}: {_status(place, model)}")
    return 0


def _status(place: ServerPlace, model: str) -> str:
    return next(str(card["status"]["value"]) for card in cards(place) if card["id"] == model)
