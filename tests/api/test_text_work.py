"""Work on texts at the server's own expense: refused by its size before it is begun, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from headrace.front.server.openai.render import MAX_DERENDERED_TOKENS
from headrace.front.text.tokenizer import MAX_TEXT_CHARS
from tests.api.serving import Served, serving

MESSAGES = [{"role": "user", "content": "fox"}]
TOO_LONG = "fox " * (MAX_TEXT_CHARS // 4 + 1)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model, "--max-n", "256") as served:
        yield served
        assert served.at_rest() and served.stop() == 0


def generated(*lengths: int) -> dict[str, Any]:
    """An answer of the generate route with choices of so many tokens."""
    return {"choices": [{"index": i, "token_ids": [5] * n} for i, n in enumerate(lengths)]}


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/chat/completions/derender", {"messages": MESSAGES}),
        ("/v1/completions/derender", {"prompt": "fox"}),
    ],
)
def test_more_tokens_than_any_answer_has_are_not_derendered(
    served: Served, path: str, request_: dict[str, Any]
) -> None:
    length = served.get("/v1/models").json()["data"][0]["max_model_len"]
    whole = served.post(path, {"request": request_, "response": generated(length)})
    assert whole.status_code == 200, whole.text
    refused = served.post(path, {"request": request_, "response": generated(500_000)})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "response.choices.token_ids"
    assert "500000" in error["message"] and str(length) in error["message"]
    most = max(MAX_DERENDERED_TOKENS, length)
    many = [length] * (most // length + 1)
    refused = served.post(
        path, {"request": {**request_, "n": len(many)}, "response": generated(*many)}
    )
    assert refused.status_code == 400
    assert str(most) in refused.json()["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "fox " * 3000}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "fox " * 3000, "stream": True}, "prompt"),
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/chat/completions", {**CHAT, "stream": True}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/v1/responses", {"input": "fox " * 3000}, "input"),
    ],
)
def test_a_context_that_is_too_short_is_told_in_openais_words(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    """By these words litellm and others know that the prompt must be cut."""
    length = served.get("/v1/models").json()["data"][0]["max_model_len"]
    refused = served.post(path, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    words = f"This model's maximum context length is {length} tokens."
    assert error["message"].startswith(words), error
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": TOO_LONG, "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/completions", {"prompt": [TOO_LONG], "truncate_prompt_tokens": -1}, "prompt"),
        ("/v1/completions/render", {"prompt": TOO_LONG, "truncate_prompt_tokens": 5}, "prompt"),
    ],
)
def test_a_text_is_bounded_also_where_the_model_need_not_hold_it(
    served: Served, path: str, body: dict[str, Any], field: str
) -> None:
    refused = served.post(path, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == field
    assert str(len(TOO_LONG)) in error["message"] and str(MAX_TEXT_CHARS) in error["message"]


def test_a_long_text_is_tokenized_off_the_loop_with_its_strings(served: Served) -> None:
    text = "fox " * 20_000
    answer = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) >= 20_000
    back = served.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back["prompt"].strip() == text.strip()


def test_a_large_frame_of_a_web_socket_is_read_as_a_body_is(served: Served) -> None:
    url = served.url.replace("http", "ws") + "/v1/responses"
    with connect(url, max_size=None) as socket:
        socket.send('{"type": "response.create", "x": "' + "y" * (1 << 20) + '", "input": 5}')
        assert '"status":400' in str(socket.recv(timeout=300))


@pytest.mark.parametrize("side", ["left", "right"])
def test_offsets_of_a_cut_prompt_are_those_of_the_text_that_is_echoed(
    served: Served, side: str
) -> None:
    cut = {"truncate_prompt_tokens": 4, "truncation_side": side}
    asked = {"prompt": "The quick brown fox jumps over it", "max_tokens": 2, "logprobs": 0, **cut}
    choice = served.post("/v1/completions", {**asked, "echo": True}).json()["choices"][0]
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == 6
    for token, at in list(zip(scores["tokens"], scores["text_offset"], strict=True))[:4]:
        assert choice["text"][at : at + len(token)] == token


def test_alternatives_have_their_ranks(served: Served) -> None:
    asked = {"prompt": [5, 6], "max_tokens": 2, "prompt_logprobs": 3}
    answer = served.post("/v1/completions", asked).json()["choices"][0]
    for position in answer["prompt_logprobs"][1:]:
        ranks = [entry["rank"] for entry in position.values()]
        assert None not in ranks and {1, 2, 3} <= set(ranks)
