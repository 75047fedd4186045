"""OpenAI's `prediction`: a text that the answer may be is verified, not generated (SPC-02)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.clients import openai_client
from tests.api.serving import Served, serving

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 8, "adaptive": false}'
QUESTION: Any = [{"role": "user", "content": "Count from one to twelve, please."}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cache = tmp_path_factory.mktemp("cache")
    options = ("--speculative-config", SPECULATION)
    with serving(None, *options, HEADRACE_CACHE_DIR=str(cache)) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_client(served.url, "none") as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        **more,
    )


@pytest.mark.parametrize("parts", [False, True])
def test_a_right_prediction_is_accepted(client: openai.OpenAI, parts: bool) -> None:
    plain = ask(client)
    text = plain.choices[0].message.content
    assert text and plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    content: Any = [{"type": "text", "text": text}] if parts else text
    predicted = ask(client, prediction={"type": "content", "content": content})
    assert predicted.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens is not None


@pytest.mark.slow
def test_where_the_time_went_tells_the_drafts(client: openai.OpenAI, served: Served) -> None:
    """OBS-05: how many of how many stood."""
    text = ask(client).choices[0].message.content
    told = ask(
        client,
        prediction={"type": "content", "content": text},
        extra_headers={"x-headrace-timing": "1"},
        stream=True,
    )
    lines = list(told.response.iter_lines())
    timing = json.loads(next(line for line in lines if line.startswith(": timing "))[9:])
    assert 0 < timing["num_accepted"] <= timing["num_drafted"]
    asked = {"messages": QUESTION, "max_tokens": 64, "temperature": 0}
    asked["prediction"] = {"type": "content", "content": text}
    header = served.post("/v1/chat/completions", asked, **{"x-headrace-timing": "1"}).headers
    accepted, drafted = re.search(r'drafts;desc="(\d+)/(\d+)"', header["server-timing"]).groups()
    assert 0 < int(accepted) <= int(drafted)


@pytest.mark.slow
def test_a_wrong_prediction_changes_no_answer(client: openai.OpenAI) -> None:
    plain = ask(client)
    wrong = ask(client, prediction={"type": "content", "content": "The weather is fine. " * 9})
    assert wrong.choices[0].message.content == plain.choices[0].message.content


def test_a_streamed_answer_tells_the_counts_too(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    chunks = list(
        ask(
            client,
            prediction={"type": "content", "content": text},
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ({"type": "image", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
        ({"type": "content", "content": "word " * 200_000}, "prediction.content"),
    ],
)
def test_a_malformed_prediction_is_refused(
    client: openai.OpenAI, prediction: Any, field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, prediction=prediction)
    assert field in str(refused.value)


def test_a_server_that_does_not_speculate_takes_it_too(gpt: openai.OpenAI) -> None:
    answer = ask(gpt, prediction={"type": "content", "content": "One, two, three"})
    assert answer.choices[0].message.content
