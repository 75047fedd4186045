"""/v1/batches with the official client, and across restarts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.serving import serving
from tests.batches.conftest import chat_line, client_of

Write = Callable[[list[dict[str, Any]]], Path]
OVER = ("completed", "failed", "cancelled", "expired")


def start(client: openai.OpenAI, path: Path, endpoint: Any = "/v1/chat/completions") -> Any:
    with path.open("rb") as file:
        made = client.files.create(file=file, purpose="batch")
    return client.batches.create(
        input_file_id=made.id, endpoint=endpoint, completion_window="24h", metadata={"k": "v"}
    )


def finished(client: openai.OpenAI, ident: str) -> Any:
    while (batch := client.batches.retrieve(ident)).status not in OVER:
        time.sleep(0.1)
    return batch


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The answers by custom_id, each exactly once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_each_line_gets_the_answer_of_its_route(client: openai.OpenAI, write_lines: Write) -> None:
    lines = [
        *(chat_line(i) for i in range(12)),
        chat_line(99, temperature=7),
        chat_line(98, stream=True),
    ]
    batch = start(client, write_lines(lines))
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"k": "v"}
    batch = finished(client, batch.id)
    assert batch.status == "completed" and batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (14, 12)
    good, bad = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert good.keys() == {f"r{i}" for i in range(12)} and bad.keys() == {"r99", "r98"}
    direct = client.chat.completions.create(model="headrace-demo", **lines[3]["body"])
    message = good["r3"]["body"]["choices"][0]["message"]
    assert message["content"] == direct.choices[0].message.content
    assert bad["r99"]["status_code"] == 400
    assert "temperature" in bad["r99"]["body"]["error"]["message"]
    assert batch.id in [item.id for item in client.batches.list(limit=5).data]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": ({"input": "What is 3 plus 2?", "temperature": 0}, "output"),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
        "content",
    ),
    "/v1/completions": ({"prompt": "Once", "max_tokens": 4}, "choices"),
    "/v1/embeddings": ({"input": "Once"}, "data"),
    "/v1/score": ({"text_1": "Once", "text_2": "Twice"}, "data"),
    "/v1/rerank": ({"query": "Once", "documents": ["a", "b"]}, "results"),
}


@pytest.mark.parametrize("endpoint", OTHERS)
def test_every_route_that_answers_whole_can_stand_in_a_batch(
    client: openai.OpenAI, write_lines: Write, endpoint: str
) -> None:
    body, field = OTHERS[endpoint]
    line = {"method": "POST", "url": endpoint}
    lines = [
        {**line, "custom_id": "good", "body": body},
        {**line, "custom_id": "bad", "body": {**body, "background": True}},
        {**line, "custom_id": "none", "body": {"model": "no-such-model", **body}},
    ]
    batch = finished(client, start(client, write_lines(lines), endpoint).id)
    good, bad = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert good.keys() == {"good"} and bad.keys() == {"bad", "none"}
    assert good["good"]["body"][field]
    assert bad["bad"]["body"]["error"]["type"] == "invalid_request_error"
    assert bad["none"]["status_code"] == 404
    assert (bad["none"]["body"].get("type") == "error") == (endpoint == "/v1/messages")


def test_a_file_with_mistakes_fails_with_their_lines(
    client: openai.OpenAI, write_lines: Write
) -> None:
    lines = [
        chat_line(1),
        chat_line(1),
        {**chat_line(2), "url": "/v1/completions"},
        {**chat_line(3), "custom_id": ""},
        {"custom_id": "x"},
    ]
    path = write_lines(lines)
    path.write_text(path.read_text() + "{no json\n\n")
    batch = finished(client, start(client, path).id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [2, 3, 4, 5, 6]
    path.write_text("\n")
    assert finished(client, start(client, path).id).status == "failed"


def test_what_is_no_batch_is_refused(client: openai.OpenAI) -> None:
    made = client.files.create(file=("a", b"x"), purpose="user_data")
    ask: Any = client.batches.create
    with pytest.raises(openai.BadRequestError, match="purpose"):
        ask(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        ask(input_file_id=made.id, endpoint="/health", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        ask(input_file_id="file-../../x", endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_../../x")
    client.files.delete(made.id)


def test_a_cancelled_batch_keeps_the_answers_it_has(
    client: openai.OpenAI, other: openai.OpenAI, write_lines: Write
) -> None:
    batch = start(client, write_lines([chat_line(i, max_tokens=200) for i in range(300)]))
    while not (now := client.batches.retrieve(batch.id)).request_counts.completed:
        assert now.status not in OVER
        time.sleep(0.05)
    with pytest.raises(openai.NotFoundError):
        other.batches.cancel(batch.id)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = finished(client, batch.id)
    assert batch.status == "cancelled"
    found = answers(client, batch.output_file_id)
    assert 0 < len(found) < 300 and len(found) == batch.request_counts.completed
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


@pytest.mark.slow
def test_a_batch_survives_a_drain_and_a_kill(
    model: Path, tmp_path: Path, write_lines: Write
) -> None:
    """Exactly one answer for each line, whatever ended the server in between. Steps are so slow that it ends before the
    batch does."""
    options = ("--file-store", str(tmp_path / "store"), "--shutdown-timeout-s", "1")
    path = write_lines([chat_line(i, max_tokens=4) for i in range(400)])
    with serving(model, *options, step_s=0.2) as served, client_of(served) as client:
        ident = start(client, path).id
        while not client.batches.retrieve(ident).request_counts.completed:
            time.sleep(0.05)
        assert served.stop() == 0
    with serving(model, *options, step_s=0.2) as served, client_of(served) as client:
        before = client.batches.retrieve(ident)
        assert before.status == "in_progress"
        time.sleep(1.0)
        served.stop(signal.SIGKILL)
    with serving(model, *options) as served, client_of(served) as client:
        batch = finished(client, ident)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.completed == 400 and batch.error_file_id is None
        assert answers(client, batch.output_file_id).keys() == {f"r{i}" for i in range(400)}
        assert served.stop() == 0


def test_answers_that_find_no_room_end_the_batch_and_are_kept(
    model: Path, tmp_path: Path, write_lines: Write
) -> None:
    options = ("--file-store", str(tmp_path / "store"), "--file-store-bytes", "200KiB")
    path = write_lines([chat_line(i, max_tokens=64) for i in range(200)])
    with serving(model, *options) as served, client_of(served) as client:
        batch = finished(client, start(client, path).id)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data
        assert "no room" in (batch.errors.data[0].message or "")
        found = answers(client, batch.output_file_id)
        assert batch.request_counts is not None
        assert 0 < len(found) == batch.request_counts.completed < 200


def test_two_api_processes_run_a_batch_once(
    model: Path, tmp_path: Path, write_lines: Write
) -> None:
    options = ("--file-store", str(tmp_path / "store"), "--api-servers", "2")
    path = write_lines([chat_line(i, max_tokens=4) for i in range(100)])
    with serving(model, *options) as served, client_of(served) as client:
        batch = finished(client, start(client, path).id)
        assert answers(client, batch.output_file_id).keys() == {f"r{i}" for i in range(100)}


def test_without_a_store_the_routes_say_so(model: Path) -> None:
    with serving(model, "--file-store", "none") as served:
        answer = served.get("/v1/batches")
        assert answer.status_code == 501 and "--file-store" in answer.json()["error"]["message"]
