"""A stream that waits in the engine's queue: its headers are there, and with them its id. No comments are sent here, so
that nothing but being queued can have sent the headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import NO_TLS, Served, eventually, serving

MESSAGES = [{"role": "user", "content": "fox"}]
LONG = {"prompt": "fox", "max_tokens": 1500, "ignore_eos": True, "stream": True}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "fox"},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2},
    "/v1/responses": {"input": "fox", "model": "tiny-0.01"},
    "/v1/messages": {"messages": MESSAGES, "model": "tiny-0.01"},
    "/v2/chat": {"messages": MESSAGES, "model": "tiny-0.01"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}},
}


@pytest.fixture(scope="module")
def one_row(model: Path) -> Iterator[Served]:
    """One request runs; there are no comments in streams that wait."""
    limits = ("--max-running", "1", "--max-queued-requests", "2", "--ping-interval-s", "0")
    with serving(model, *limits, step_s=0.01) as served:
        yield served
        assert served.at_rest() and served.stop() == 0


@contextmanager
def held(served: Served, waiting: int = 0) -> Iterator[None]:
    """A stream that runs, and so many that wait behind it."""
    with ExitStack() as stack:
        for number in range(waiting + 1):
            stack.enter_context(
                httpx.stream(
                    "POST", served.url + "/v1/completions", json=LONG, timeout=300, verify=NO_TLS
                )
            )
            core = {"running": 1, "waiting": number}
            eventually(
                lambda core=core: core.items() <= served.ledger()["engines"][0].items(),
                within_s=5,
            )
        yield
    eventually(served.at_rest, within_s=5)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_queued_stream_has_its_headers_and_can_be_asked_about(one_row: Served, path: str) -> None:
    body = {"max_tokens": 3, **DIALECTS[path], "stream": True}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    with ExitStack() as busy:
        busy.enter_context(held(one_row))
        with httpx.stream(
            "POST", one_row.url + path, json=body, timeout=300, verify=NO_TLS
        ) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            ident = response.headers["x-request-id"]
            waiting = one_row.get(f"/v1/requests/{ident}")
            assert waiting.status_code == 200, waiting.text
            assert waiting.json()["requests"][0]["state"] == "waiting"
            busy.close()
            events = [line for line in response.iter_lines() if line]
    assert events and not events[0].startswith(":"), "the first line is an event"


@pytest.mark.parametrize(
    "wrong", [{"prompt": [5] * 10**5}, {"temperature": 9}, {"structured_outputs": {"regex": "("}}]
)
def test_what_is_wrong_with_a_stream_keeps_its_status(one_row: Served, wrong: Any) -> None:
    with ExitStack() as busy:
        if "structured_outputs" not in wrong:  # a grammar is looked at when its turn has come
            busy.enter_context(held(one_row))
        refused = one_row.post("/v1/completions", {"prompt": "fox", **wrong, "stream": True})
    assert refused.status_code == 400, refused.text


def test_a_stream_that_finds_no_room_keeps_its_status(one_row: Served) -> None:
    with held(one_row, waiting=2):
        refused = one_row.post("/v1/completions", {"prompt": "fox", "stream": True})
    assert refused.status_code == 503 and refused.headers["x-request-id"]


def test_an_answer_that_is_no_stream_waits_for_its_status(one_row: Served) -> None:
    with held(one_row):
        answer = one_row.post("/v1/completions", {"prompt": "fox", "timeout_s": 0.3})
        # 503 where a step takes so long here that it would not be done in its time
        assert answer.status_code in (504, 503)
