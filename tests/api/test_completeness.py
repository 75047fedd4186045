"""The extensions that users rely on (contract 1, 2, 11), against a real process tree on the null executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.model_folder import write_model_folder
from tests.api.serving import NO_TLS, Served, serving

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]


def deltas(client: openai.OpenAI, **options: Any) -> list[str]:
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=24, seed=3, stream=True,
        stream_options=options,
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
        "POST", server.url + "/v1/chat/completions", json=body, verify=NO_TLS, timeout=300
    ) as response:
        next(response.iter_lines())
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    from tests.api.serving import eventually

    eventually(server.at_rest, within_s=5)


# Extensions of requests


def lines(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    text = server.post(path, {**body, "stream": True}).text
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


LONG = {"max_tokens": 24, "seed": 3, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **LONG},
    "/v1/completions": {"prompt": "hello", **LONG},
}


def text_of(chunk: dict[str, Any]) -> str:
    return "".join(
        c.get("text") or c.get("delta", {}).get("content") or "" for c in chunk["choices"]
    )


@pytest.mark.parametrize("path", BODIES)
def test_an_interval_may_also_stand_beside_the_options(server: Served, path: str) -> None:
    plain = lines(server, path, BODIES[path])
    paced = lines(server, path, {**BODIES[path], "stream_interval": 8})
    assert "".join(map(text_of, paced)) == "".join(map(text_of, plain)) != ""
    assert sum(bool(text_of(chunk)) for chunk in paced) <= 1 + 24 // 8
    options = {"stream_interval": 8, "stream_options": {"stream_interval": 24}}
    assert sum(bool(text_of(c)) for c in lines(server, path, {**BODIES[path], **options})) <= 2


@pytest.mark.parametrize("path", BODIES)
def test_padded_chunks_come_in_few_sizes(server: Served, path: str) -> None:
    options = {"include_obfuscation": True, "include_usage": True}
    chunks = lines(server, path, {**BODIES[path], "stream_options": options})
    said = [chunk for chunk in chunks if chunk["choices"]]
    assert all(chunk["obfuscation"] for chunk in said)
    sizes = {
        len(json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode()) for chunk in said
    }
    assert len({size % 64 for size in sizes}) == 1
    plain = lines(server, path, BODIES[path])
    assert "".join(map(text_of, chunks)) == "".join(map(text_of, plain))
    assert not any("obfuscation" in chunk for chunk in plain)


@pytest.mark.parametrize("path", BODIES)
def test_the_tier_the_prompts_text_and_the_requests_own_id_come_back(
    server: Served, path: str
) -> None:
    asked = {
        **BODIES[path],
        "service_tier": "flex",
        "return_prompt_text": True,
        "request_id": "mine/1",
    }
    answer = server.post(path, asked)
    document = answer.json()
    assert document["service_tier"] == "flex"
    assert answer.headers["x-client-request-id"] == "mine/1" != answer.headers["x-request-id"]
    chunks = lines(server, path, asked)
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
    told = next(chunk["choices"][0] for chunk in chunks if chunk["choices"])["prompt_text"]
    place = document if path.startswith("/v1/chat") else document["choices"][0]
    assert place["prompt_text"] == told and "hello" in told
    again = server.post(path, asked, **{"x-request-id": "header"})
    assert again.headers.get_list("x-client-request-id") == ["header"]


def test_the_vocabularys_own_tokens_go_around_a_rendered_chat_on_demand(
    tmp_path: Path,
) -> None:
    folder = write_model_folder(tmp_path / "bos")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    bos = config.get("eos_token")
    bos = bos["content"] if isinstance(bos, dict) else bos
    written = {**config, "bos_token": bos, "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    with serving(folder) as served:
        asked = {**BODIES["/v1/chat/completions"], "return_token_ids": True, "max_tokens": 1}
        plain = served.post("/v1/chat/completions", asked).json()["prompt_token_ids"]
        more = served.post("/v1/chat/completions", {**asked, "add_special_tokens": True}).json()
        (first,) = served.post("/tokenize", {"prompt": bos, "add_special_tokens": False}).json()[
            "tokens"
        ]
        assert more["prompt_token_ids"] == [first, *plain]


def test_a_request_of_many_prompts_is_not_refused_by_its_own(model: Path) -> None:
    """400 choices through a queue of 8, in waves."""
    with serving(model, "--max-queued-requests", "8", "--max-running", "4") as served:
        body = {"prompt": [f"{i} words" for i in range(200)], "max_tokens": 1, "n": 2}
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(400))
        chats = [[{"role": "user", "content": f"{i}"}] for i in range(100)]
        answer = served.post("/v1/chat/completions/batch", {"messages": chats, "max_tokens": 1})
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 100
        ranked = served.post(
            "/v1/rerank", {"query": "a", "documents": [str(i) for i in range(2000)]}
        )
        assert ranked.status_code == 200 and len(ranked.json()["results"]) == 2000
        assert served.at_rest()
