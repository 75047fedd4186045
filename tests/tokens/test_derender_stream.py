"""The derender routes chunk by chunk, beside the direct stream (contract 10, API-19).

The chunks of a generate stream, or its ids cut in other places, come back as chunks that say together what the direct
stream says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.serving import Served
from tests.tokens.test_generate import CHATS, post

CHAT_PATH = "/v1/chat/completions/derender"
COMPLETION_PATH = "/v1/completions/derender"


def frames(served: Served, path: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    answer = served.post(path, {**document, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def derendered(
    served: Served, path: str, chunks: list[dict[str, Any]], beside: dict[str, Any]
) -> list[dict[str, Any]]:
    """The chunks one by one, each choice with a state of its own."""
    states: dict[int, Any] = {}
    made = []
    for chunk in chunks:
        index = chunk["choices"][0]["index"] if chunk["choices"] else 0
        body = {"generate_chunk": chunk, "stream_state": states.get(index), **beside}
        answer = post(served, path, {"stream": True, **body})
        states[index] = answer["stream_state"]
        made.append(answer["chunk"])
    return made


def cut(chunks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """The same ids in chunks of another size; the last one of a choice has its end, as vLLM writes it."""
    ids: dict[int, list[int]] = {}
    ends: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
            ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    made: list[dict[str, Any]] = []
    for index, all_ids in ids.items():
        parts = [all_ids[at : at + size] for at in range(0, len(all_ids), size)]
        for number, part in enumerate(parts):
            end = ends[index] if number == len(parts) - 1 else None
            choice = {"index": index, "token_ids": part, "finish_reason": end}
            made.append({"request_id": "gen-1", "choices": [choice], "usage": None})
    return made


def said(chunks: list[dict[str, Any]]) -> dict[int, Any]:
    """Roles, texts, calls and ends by choice, as a client puts them together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(
                choice["index"], {"roles": 0, "content": "", "thought": "", "calls": {}, "ends": []}
            )
            delta = choice["delta"]
            whole["roles"] += "role" in delta
            whole["content"] += delta.get("content") or ""
            whole["thought"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                held = whole["calls"].setdefault(call["index"], {"ids": 0, "said": ""})
                held["ids"] += "id" in call
                function = call.get("function") or call["custom"]
                held["said"] += function.get("name", "") + "|" * ("name" in function)
                held["said"] += function.get("arguments", function.get("input", ""))
            if "function_call" in delta:
                held = whole["calls"].setdefault(0, {"ids": 0, "said": ""})
                held["said"] += delta["function_call"].get("name", "")
                held["said"] += delta["function_call"]["arguments"]
            if choice["finish_reason"]:
                whole["ends"].append(choice["finish_reason"])
    return choices


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_chunks_of_a_stream_are_derendered_one_by_one(
    bundled: Served, chat: dict[str, Any]
) -> None:
    chat = {**chat, "temperature": 0, "max_tokens": 40}
    direct = said(frames(bundled, "/v1/chat/completions", chat))
    rendered = post(bundled, "/v1/chat/completions/render", chat)
    generated = frames(bundled, "/inference/v1/generate", rendered)
    beside = {"chat_request": chat, "prompt_token_ids": rendered["token_ids"]}
    assert said(derendered(bundled, CHAT_PATH, generated, beside)) == direct
    for size in (1, 7, 1000):
        chunks = cut(generated, size)
        assert said(derendered(bundled, CHAT_PATH, chunks, beside)) == direct, f"{size} ids a chunk"


def test_scores_ids_and_usage_come_with_their_chunks(bundled: Served) -> None:
    chat = {**CHATS[1], "temperature": 0, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    chat |= {"return_token_ids": True}
    counted = {"stream_options": {"include_usage": True}}
    direct = frames(bundled, "/v1/chat/completions", {**chat, **counted})
    rendered = post(bundled, "/v1/chat/completions/render", chat)
    generated = frames(bundled, "/inference/v1/generate", {**rendered, **counted})
    beside = {"chat_request": chat, "prompt_token_ids": rendered["token_ids"]}
    made = derendered(bundled, CHAT_PATH, generated, beside)

    def scored(chunks: list[dict[str, Any]]) -> list[Any]:
        of_each = [c["logprobs"]["content"] for k in chunks for c in k["choices"] if c["logprobs"]]
        return [(entry["token"], len(entry["top_logprobs"])) for all_ in of_each for entry in all_]

    def ids(chunks: list[dict[str, Any]]) -> list[int]:
        return [i for k in chunks for c in k["choices"] for i in c.get("token_ids") or []]

    assert scored(made) == scored(direct) and scored(made)
    assert ids(made) == ids(direct) and ids(made)
    assert made[-1]["choices"] == [] == direct[-1]["choices"]
    told, shown = direct[-1]["usage"], made[-1]["usage"]
    told["prompt_tokens_details"] = shown["prompt_tokens_details"]  # what was cached
    assert shown == told
    assert shown["completion_tokens_details"]["reasoning_tokens"] > 0
    assert len({chunk["id"] for chunk in made}) == 1, "all chunks of an answer have its id"


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 1}, {"stop": " "}], ids=str)
def test_chunks_of_completions_are_derendered_one_by_one(
    bundled: Served, more: dict[str, Any]
) -> None:
    request = {"prompt": ["The cat", "A dög"], "n": 2, "temperature": 0, "max_tokens": 9, **more}
    direct = frames(bundled, "/v1/completions", request)
    made = []
    for number, rendered in enumerate(post(bundled, "/v1/completions/render", request)):
        chunks = frames(bundled, "/inference/v1/generate", rendered)
        for chunk in chunks:
            chunk["choices"][0]["index"] += number * request["n"]
        made += derendered(bundled, COMPLETION_PATH, chunks, {"completion_request": request})

    def texts(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, str, list[int]]]:
        whole: dict[int, tuple[str, str, list[int]]] = {}
        for chunk in chunks:
            for c in chunk["choices"]:
                text, end, offsets = whole.get(c["index"], ("", "", []))
                places = (c["logprobs"] or {}).get("text_offset", [])
                end = c["finish_reason"] or end
                whole[c["index"]] = (text + c["text"], end, offsets + places)
        return whole

    assert texts(made) == texts(direct)
    assert any(offsets for _, _, offsets in texts(made).values()) == ("logprobs" in more)


def test_a_chunk_that_does_not_fit_is_refused(bundled: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    length = bundled.get("/v1/models").json()["data"][0]["max_model_len"]
    two = [{"index": i, "token_ids": [1]} for i in range(2)]
    held = {"id": "a", "created": 1, "output_token_ids": [5] * length}
    for change, field in (
        ({"generate_chunk": {"choices": two}}, "generate_chunk.choices"),
        ({"chat_request": None}, "chat_request"),
        ({"stream_state": held}, "stream_state.output_token_ids"),
        ({"stream_state": {**held, "output_token_ids": [10**7]}}, "stream_state.output_token_ids"),
        ({"stream_state": {"prev_tokens": []}}, "stream_state"),
        ({"prompt_token_ids": [10**7]}, "prompt_token_ids"),
    ):
        chunk = {"choices": [{"index": 0, "token_ids": [1]}]}
        body = {"stream": True, "generate_chunk": chunk, "chat_request": chat, **change}
        refused = bundled.post(CHAT_PATH, body)
        assert refused.status_code == 400, change
        assert field in (refused.json()["error"]["param"] or ""), refused.text


BAD: list[Any] = [None, True, -1, 10**30, 1.5, "x" * 200, [], {}, [None], [-1], {"choices": 1}]


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
def test_no_value_of_a_field_breaks_the_server(bundled: Served, path: str) -> None:
    asked = {"chat_request": {"messages": [{"role": "user", "content": "x"}]}}
    if path == COMPLETION_PATH:
        asked = {"completion_request": {"prompt": "x"}}
    choice = {"index": 0, "token_ids": [5], "finish_reason": None, "logprobs": None}
    state = {"id": "a", "created": 1, "output_token_ids": [7], "finish_reason": None}
    chunk = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    whole = {"generate_chunk": chunk, "stream_state": state, "prompt_token_ids": [5], **asked}
    assert post(bundled, path, {"stream": True, **whole})["stream_state"]["output_token_ids"] == [
        7,
        5,
    ]
    bodies = [{**whole, name: value} for name in whole for value in BAD]
    for value in BAD:
        bodies += [{**whole, "stream_state": {**state, name: value}} for name in state]
        changed = [{**choice, name: value} for name in choice]
        bodies += [{**whole, "generate_chunk": {**chunk, "choices": [one]}} for one in changed]
        bodies += [{**whole, "generate_chunk": {**chunk, name: value}} for name in chunk]
    for body in bodies:
        answer = bundled.post(path, {"stream": True, **body})
        assert answer.status_code in (200, 400), (body, answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["message"], body
