"""Answers that end early: inside a call, or because they go round in a circle. Real server, official client."""

from __future__ import annotations

from typing import Any

import openai

from tests.dialects.test_custom_tools import ASKED

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
FORCED: Any = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
}


def test_a_stop_string_inside_a_call_is_no_call_to_run(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(**FORCED).choices[0]
    assert whole.finish_reason == "tool_calls"
    cut = gpt.chat.completions.create(**FORCED, stop=["city"]).choices[0]
    assert cut.finish_reason == "stop"
    stream = list(gpt.chat.completions.create(**FORCED, stop=["city"], stream=True))
    assert stream[-1].choices[0].finish_reason == "stop"
    short = gpt.chat.completions.create(**{**FORCED, "max_tokens": 6}).choices[0]
    assert short.finish_reason == "length"


def test_a_custom_call_that_was_cut_off_shows_no_json(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(**ASKED).choices[0].message.tool_calls or []
    (call,) = whole
    assert call.type == "custom"
    for limit in range(4, 40, 3):
        choice = gpt.chat.completions.create(**{**ASKED, "max_tokens": limit}).choices[0]
        for made in choice.message.tool_calls or []:
            assert made.type == "custom" and call.custom.input.startswith(made.custom.input)


CIRCLE: Any = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 60,
    "extra_body": {
        "ignore_eos": True,
        "allowed_token_ids": [300],
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 7},
    },
}


def test_an_answer_that_goes_round_ends_and_says_why(gpt: openai.OpenAI) -> None:
    chat: Any = {**CIRCLE, "messages": [{"role": "user", "content": "Hi"}]}
    made = gpt.chat.completions.create(**chat)
    choice: Any = made.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("repetition", "repetition_detected")
    assert made.usage is not None and made.usage.completion_tokens == 7
    last: Any = list(gpt.chat.completions.create(**chat, stream=True))[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("repetition", "repetition_detected")
    text: Any = gpt.completions.create(**CIRCLE, prompt="Hi", n=2)
    assert [c.finish_reason for c in text.choices] == ["repetition"] * 2
    off = {**CIRCLE["extra_body"], "repetition_detection": {"max_pattern_size": 0}}
    free = gpt.completions.create(**{**CIRCLE, "extra_body": off}, prompt="Hi")
    assert free.choices[0].finish_reason == "length"


def test_a_response_that_goes_round_is_incomplete(gpt: openai.OpenAI) -> None:
    asked = {k: v for k, v in CIRCLE.items() if k != "max_tokens"}
    made: Any = gpt.responses.create(**asked, input="Hi", max_output_tokens=60)
    assert made.status == "incomplete" and made.incomplete_details.reason == "repetition"
    assert made.usage.output_tokens == 7
