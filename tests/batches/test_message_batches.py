"""/v1/messages/batches with Anthropic's client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.clients import anthropic, anthropic_client
from tests.api.serving import Served
from tests.batches.conftest import KEY, OTHER, client_of


@pytest.fixture
def claude(bundled: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(bundled.url, KEY) as client:
        yield client


def asked(number: int, **more: Any) -> Any:
    messages = [{"role": "user", "content": f"What is {number} plus 2?"}]
    params = {"model": "demo", "max_tokens": 8, "messages": messages, **more}
    return {"custom_id": f"r{number}", "params": params}


def ended(claude: anthropic.Anthropic, ident: str) -> Any:
    while (batch := claude.messages.batches.retrieve(ident)).processing_status != "ended":
        time.sleep(0.05)
    return batch


def test_each_request_has_the_result_of_its_route(
    claude: anthropic.Anthropic, bundled: Served
) -> None:
    """What it would be answered alone, or the error in Anthropic's shape."""
    with client_of(bundled) as openai_client:
        model = openai_client.models.list().data[0].id
    greedy = {"model": model, "temperature": 0}
    entries = [*(asked(i, **greedy) for i in range(3)), asked(9, model=model, stream=True)]
    made = claude.messages.batches.create(requests=entries)
    assert made.id.startswith("msgbatch_") and made.processing_status == "in_progress"
    assert made.request_counts.processing == 4 and made.results_url is None
    batch = ended(claude, made.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (3, 1, 0)
    assert batch.ended_at is not None and batch.created_at <= batch.ended_at <= batch.expires_at
    results = {one.custom_id: one.result for one in claude.messages.batches.results(made.id)}
    assert results.keys() == {"r0", "r1", "r2", "r9"}
    for number in range(3):
        alone = claude.messages.create(
            model=model,
            max_tokens=8,
            messages=entries[number]["params"]["messages"],
            extra_body={"temperature": 0},
        )
        told = results[f"r{number}"]
        assert told.type == "succeeded"
        assert told.message.content == alone.content
        assert told.message.usage.output_tokens == alone.usage.output_tokens
    failed = results["r9"]
    assert failed.type == "errored" and failed.error.error.type == "invalid_request_error"
    assert "stream" in failed.error.error.message
    listed = claude.messages.batches.list(limit=1)
    assert listed.data[0].id == made.id
    assert claude.messages.batches.delete(made.id).id == made.id
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(made.id)


def test_a_cancelled_batch_tells_what_has_no_answer(claude: anthropic.Anthropic) -> None:
    entries = [asked(i, max_tokens=300, stop_sequences=["\0"]) for i in range(60)]
    for one in entries:
        del one["params"]["model"]
    made = claude.messages.batches.create(requests=entries)
    with pytest.raises(anthropic.ConflictError):
        claude.messages.batches.delete(made.id)
    claude.messages.batches.cancel(made.id)
    batch = ended(claude, made.id)
    assert batch.cancel_initiated_at is not None
    results = [one.result.type for one in claude.messages.batches.results(made.id)]
    assert len(results) == 60 and set(results) <= {"succeeded", "canceled"}
    assert batch.request_counts.canceled == results.count("canceled")
    assert batch.request_counts.succeeded == results.count("succeeded")


def test_what_is_wrong_and_whose_it_is(claude: anthropic.Anthropic, bundled: Served) -> None:
    for requests, field in (
        ([], "requests"),
        ([asked(1), asked(1)], "requests[1].custom_id"),
        ([{**asked(1), "custom_id": "a b"}], "custom_id"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=field.replace("[", r"\[")):
            claude.messages.batches.create(requests=requests)
    made = claude.messages.batches.create(requests=[asked(1)])
    with anthropic_client(bundled.url, OTHER) as other:
        for act in ("retrieve", "cancel", "delete", "results"):
            with pytest.raises(anthropic.NotFoundError):
                getattr(other.messages.batches, act)(made.id)
        assert other.messages.batches.list().data == []
    ended(claude, made.id)
