"""The extensions that users rely on (contract 1, 2, 11), against a real process tree on the null executor."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.serving import NO_TLS, Served

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]


def deltas(client: openai.OpenAI, **options: Any) -> list[str]:
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=24, seed=3, stream=True,
        stream_options=options,  # type: ignore[arg-type]
    )  # fmt: skip
    return [
        choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content
    ]


def test_a_stream_interval_makes_fewer_chunks_with_the_same_text(client: openai.OpenAI) -> None:
    """API-17, REG-105."""
    plain = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=24, seed=3
    ).choices[0]
    by_tokens = deltas(client, stream_interval=10)
    assert len(by_tokens) <= 4 and "".join(by_tokens) == plain.message.content
    by_time = deltas(client, stream_interval_ms=60_000)
    assert len(by_time) <= 2 and "".join(by_time) == plain.message.content


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stream_interval": 0}, "stream_options.stream_interval"),
        ({"stream_interval_ms": -1}, "stream_options.stream_interval_ms"),
    ],
)
def test_an_interval_out_of_range_is_refused(
    server: Served, options: dict[str, Any], field: str
) -> None:
    body = {"messages": MESSAGES, "stream": True, "stream_options": options}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_batch_answers_every_conversation_in_order(server: Served) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("fox", "wheel", "mill")]
    asked = {"max_tokens": 6, "seed": 5, "n": 2}
    batch = server.post("/v1/chat/completions/batch", {"messages": conversations, **asked})
    assert batch.status_code == 200, batch.text
    document = batch.json()
    single = [
        server.post("/v1/chat/completions", {"messages": one, **asked}).json()
        for one in conversations
    ]
    assert [choice["index"] for choice in document["choices"]] == list(range(6))
    told = [choice["message"]["content"] for choice in document["choices"]]
    assert told == [c["message"]["content"] for one in single for c in one["choices"]]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert document["usage"][key] == sum(one["usage"][key] for one in single)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": MESSAGES}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [MESSAGES] * 257}, "messages"),
        ({"messages": [MESSAGES], "stream": True}, "stream"),
        ({"messages": [MESSAGES, [{"role": "nobody", "content": "x"}]]}, "messages[1][0].role"),
    ],
)
def test_a_batch_that_is_none_is_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/chat/completions/batch", fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert server.at_rest()


def test_a_prompt_is_cut_on_the_side_that_is_asked_for(server: Served) -> None:
    body = {"prompt": [10, 11, 12, 13, 14], "max_tokens": 1, "return_token_ids": True}
    for side, kept in ((None, [13, 14]), ("left", [13, 14]), ("right", [10, 11])):
        asked = {**body, "truncate_prompt_tokens": 2, "truncation_side": side}
        choice = server.post("/v1/completions", asked).json()["choices"][0]
        assert choice["prompt_token_ids"] == kept


def test_a_suffix_without_tokens_for_it_is_refused_by_name(server: Served) -> None:
    answer = server.post("/v1/completions", {"prompt": "def f(", "suffix": "return x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert "insertion" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "x", "suffix": ""}).status_code == 200


def test_forced_calls_of_a_model_without_a_format_are_calls_all_the_same(server: Served) -> None:
    """The null executor draws at random: only the grammar makes this a call."""
    tool = {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"which": {"enum": ["left", "right"]}},
                "required": ["which"],
                "additionalProperties": False,
            },
        },
    }
    for stream in (False, True):
        body = {
            "messages": MESSAGES, "tools": [tool], "seed": 2, "max_tokens": 200,
            "tool_choice": {"type": "function", "function": {"name": "pick"}}, "stream": stream,
        }  # fmt: skip
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        if stream:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            parts = [json.loads(event)["choices"][0]["delta"] for event in events]
            calls = [call for part in parts for call in part.get("tool_calls", [])]
            name = "".join(call["function"].get("name", "") for call in calls)
            arguments = "".join(call["function"].get("arguments", "") for call in calls)
        else:
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert name == "pick" and json.loads(arguments)["which"] in ("left", "right")


def test_a_client_that_leaves_takes_its_grammar_along(server: Served) -> None:
    body = {
        "messages": MESSAGES, "stream": True, "max_tokens": 1500,
        "structured_outputs": {"regex": "[a-z ]{1400,}"},
    }  # fmt: skip
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=body, verify=NO_TLS
    ) as response:
        next(response.iter_lines())
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    from tests.api.serving import eventually

    eventually(server.at_rest, within_s=5)
