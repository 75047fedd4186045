"""Attention weights over HTTP (API-21): a compact form, limits, and nothing unless the server was started for it."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.api.serving import Served, serving

ASK = {"prompt": "The fox went to the river and", "max_tokens": 6, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(None, "--threads", "1", "--attention-capture") as found:
        yield found


def weights(entry: dict[str, Any]) -> np.ndarray:
    data = gzip.decompress(base64.b64decode(entry["data"]))
    return np.frombuffer(data, np.dtype(entry["dtype"])).reshape(entry["shape"])


def check(entries: list[dict[str, Any]], usage: dict[str, int], layers: list[int]) -> None:
    assert [entry["layer_idx"] for entry in entries] == layers
    total = usage["total_tokens"] - 1
    for entry in entries:
        told = weights(entry).astype(np.float64)
        assert told.shape[0] == told.shape[2] == total == entry["token_meta"]["total_len"]
        assert entry["token_meta"]["prompt_len"] == usage["prompt_tokens"]
        assert np.abs(told.sum(-1) - 1).max() < 5e-3
        assert (
            np.triu(np.ones((total, total)), 1)[:, None, :].repeat(told.shape[1], 1)[told > 0].sum()
            == 0
        ), "nobody looks ahead"


def test_a_completion_tells_the_layers_that_were_asked_for(served: Served) -> None:
    plain = served.post("/v1/completions", ASK).json()
    for dtype in ("float16", "float32"):
        scoring_input = {
            "attn_capture": 1,
            "attn_capture_layers": "2,0",
            "attn_capture_dtype": dtype,
        }
        answer = served.post("/v1/completions", {**ASK, **scoring_input}).json()
        choice = answer["choices"][0]
        assert choice["text"] == plain["choices"][0]["text"]
        assert {entry["dtype"] for entry in choice["attn_capture_data"]} == {dtype}
        check(choice["attn_capture_data"], answer["usage"], [0, 2])
    assert "attn_capture_data" not in plain["choices"][0]
    assert served.at_rest()


def test_a_chat_tells_the_first_layer_of_its_first_choice_unless_asked_otherwise(
    served: Served,
) -> None:
    answer = served.post("/v1/chat/completions", {**CHAT, "attn_capture": 1}).json()
    check(answer["attn_capture_data"], answer["usage"], [0])
    none = served.post("/v1/chat/completions", {**CHAT, "attn_capture": 0}).json()
    assert "attn_capture_data" not in none


@pytest.mark.parametrize(
    ("scoring_input", "words"),
    [
        ({"attn_capture": 1, "stream": True}, "attn_capture: cannot be streamed"),
        ({"attn_capture": 1, "attn_capture_layers": "999"}, "attn_capture_layers is 999"),
        ({"attn_capture": 1, "attn_capture_layers": "one"}, "attn_capture_layers"),
        ({"attn_capture": 2}, "attn_capture"),
        ({"attn_capture": 1, "max_tokens": 1900}, "at most 64 MiB"),
    ],
)
def test_what_cannot_be_told_is_a_400_with_the_bound(
    served: Served, scoring_input: dict[str, Any], words: str
) -> None:
    answer = served.post("/v1/completions", {**ASK, **scoring_input})
    assert answer.status_code == 400 and words in answer.text, answer.text


def test_a_server_that_was_not_started_for_it_says_how() -> None:
    with serving(None, "--threads", "1") as plain:
        answer = plain.post("/v1/completions", {**ASK, "attn_capture": 1})
        assert answer.status_code == 400 and "--attention-capture" in answer.text
