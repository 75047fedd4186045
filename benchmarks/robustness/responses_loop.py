"""Time to the first event of each turn of a growing conversation over Responses: HTTP against WebSocket (API-13).

    python -m benchmarks.robustness.responses_loop --turns 40 [--write]

HTTP as layout agents use it sends the whole history with each turn (store: false); with stored state it sends what is
new and the id of the turn before, as the WebSocket does, whose connection remembers by itself. The null executor
answers, so that only the way to the engine and back is measured. The ways take turns, so that they share what else the
machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from benchmarks.robustness.serving import null_model, server
from headrace.bench.report import versions

NEW = "word " * 60
ANSWER = {"max_output_tokens": 8, "ignore_eos": True, "temperature": 0}
WAYS = ("http, whole history", "http, stored", "websocket")
END = ("response.completed", "response.incomplete", "response.failed", "error")


def over_http(client: httpx.Client, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds to the first event, and the finished response."""
    began = time.perf_counter()
    first, last = 0.0, ""
    with client.stream("POST", "/v1/responses", json={**body, **ANSWER, "stream": True}) as answer:
        for line in answer.iter_lines():
            first = first or time.perf_counter() - began
            last = line if line.startswith("data: ") else last
    return first, json.loads(last.removeprefix("data: "))["response"]


def over_socket(socket: ClientConnection, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The same over an open connection."""
    began = time.perf_counter()
    socket.send(json.dumps({"type": "response.create", **body, **ANSWER}))
    first = 0.0
    while True:
        event = json.loads(socket.recv())
        first = first or time.perf_counter() - began
        if event["type"] in END:
            return first, event["response"]


def conversation(
    client: httpx.Client, socket: ClientConnection, turns: int
) -> dict[str, list[float]]:
    """Seconds per way and turn."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    history: list[Any] = []
    previous: dict[str, str | None] = dict.fromkeys(WAYS)
    for turn in range(turns):
        new = {"role": "user", "content": f"{turn} {NEW}"}
        history.append(new)
        spent, answer = over_http(client, {"input": history, "store": False})
        seconds[WAYS[0]].append(spent)
        history += answer["output"]
        for way in WAYS[1:]:
            body = {"input": [new], "previous_response_id": previous[way], "store": way == WAYS[1]}
            spent, answer = over_http(client, body) if way == WAYS[1] else over_socket(socket, body)
            seconds[way].append(spent)
            previous[way] = answer["id"]
    return seconds


def main() -> None:
    """Prints p50 in milliseconds over the last quarter of the turns, where the history is long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {"HEADRACE_CACHE_DIR": folder}
        model = Path(folder) / "model"
        model.mkdir()
        arguments = null_model(model, step_s=0.0)
        with server(*arguments, environment=environment) as (url, _):
            address = url.replace("http", "ws") + "/v1/responses"
            with httpx.Client(base_url=url, timeout=60) as client:
                for _ in range(given.rounds):
                    with connect(address) as socket:
                        for way, spent in conversation(client, socket, given.turns).items():
                            found[way] += spent[-max(given.turns // 4, 1) :]
    table = {way: round(statistics.median(spent) * 1000, 2) for way, spent in found.items()}
    told = {"turns": given.turns, "rounds": given.rounds, "first_event_p50_ms": table}
    print(json.dumps(told, indent=2))
    if given.write:
        path = Path(__file__).with_suffix(".json")
        path.write_text(json.dumps({**told, "versions": versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
