"""A server whose answers go on where the context ends, as llama.cpp's with --context-shift (BEY-42)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.front.client.context_shift import shifted
from tests.api.serving import Served, serving

pytestmark = [pytest.mark.serial, pytest.mark.slow]
CONTEXT, KEEP = 64, 8
PROMPT = [(11 * i) % 3000 + 5 for i in range(50)]


def ask(served: Served, ids: list[int], count: int) -> list[int]:
    body = {
        "token_ids": ids,
        "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True},
    }
    answer = served.post("/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_answers_and_chats_go_on_past_the_context() -> None:
    """Token for token what the same engine says behind what is left, asked for that alone."""
    options = (
        "--device",
        "cpu",
        "--max-model-len",
        str(CONTEXT),
        "--context-shift",
        "--context-keep",
        str(KEEP),
    )
    with serving(None, *options) as served:
        whole, wanted = list(PROMPT), list[int]()
        while len(wanted) < CONTEXT:
            if len(whole) == CONTEXT:
                whole = shifted(whole, keep=KEEP, room=CONTEXT - 1)
            came = ask(served, whole, min(CONTEXT - len(whole), CONTEXT - len(wanted)))
            whole, wanted = whole + came, wanted + came
        assert ask(served, PROMPT, CONTEXT) == wanted
        assert ask(served, PROMPT * 9, 5) == ask(
            served, shifted(PROMPT * 9, keep=KEEP, room=CONTEXT - 1), 5
        )
        text = served.post("/v1/completions", {"prompt": "The fox. " * 400, "max_tokens": 4})
        assert text.status_code == 200 and text.json()["usage"]["prompt_tokens"] < CONTEXT
        talk: list[dict[str, Any]] = [{"role": "system", "content": "You are brief."}]
        for turn in range(12):
            talk.append({"role": "user", "content": f"Tell me about bridge number {turn}, please."})
            answer = served.post("/v1/chat/completions", {"messages": talk, "max_tokens": 8})
            assert answer.status_code == 200, answer.text
            document = answer.json()
            assert document["usage"]["prompt_tokens"] < CONTEXT
            talk.append(document["choices"][0]["message"])
        streamed = served.post("/v1/chat/completions", {"messages": talk[:-1], "stream": True})
        assert streamed.text.rstrip().endswith("data: [DONE]")


def test_what_would_leave_nothing_to_shift_is_refused_at_start() -> None:
    options = (
        "--device",
        "cpu",
        "--max-model-len",
        "64",
        "--context-shift",
        "--context-keep",
        "33",
    )
    refused = r"--context-keep 33: at most half of the context"
    with pytest.raises(AssertionError, match=refused), serving(None, *options):
        pass
