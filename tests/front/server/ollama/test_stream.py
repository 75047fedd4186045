"""Ollama's lines: texts, thinking and calls, and the full answer that they fold to (BEY-43)."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.front.client.events import Ended, Started
from headrace.front.server.conversation.context import Timeline
from headrace.front.server.conversation.stages import ParsedDelta
from headrace.front.server.ollama.stream import OllamaStream, to_answer, to_chunks
from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)

END = Ended(index=0, reason="stop", num_output=6)


def stream(*, chats: bool = True) -> OllamaStream:
    where = Timeline(
        front_s=0.5,
        queue_s=0.25,
        prefill_s=1.0,
        decode_s=2.0,
        delivery_s=0.0,
        end=END,
        num_prompt=3,
    )
    return OllamaStream(model="m", chats=chats, load_s=0.125, timeline=lambda: where)


async def events(*parts: Part, end: Ended = END) -> Any:
    yield Started(3)
    for part in parts:
        yield ParsedDelta(index=0, text="", token_ids=[1], parts=[part], num_reasoning=0)
    yield end


SAID: tuple[Part, ...] = (
    Reasoning("I loo"),
    Reasoning("k."),
    Content("So"),
    Content(": "),
    CallBegin(0, "call_1", "f"),
    CallArguments(0, '{"a":'),
    CallArguments(0, "[1]}"),
    CallEnd(0),
)


async def lines(*parts: Part, end: Ended = END, chats: bool = True) -> list[Any]:
    chunks = [chunk async for chunk in to_chunks(events(*parts, end=end), stream(chats=chats))]
    assert all(chunk.endswith(b"\n") and chunk.count(b"\n") == 1 for chunk in chunks)
    return [orjson.loads(chunk) for chunk in chunks]


async def test_lines_fold_to_the_full_answer() -> None:
    *said, last = await lines(*SAID)
    full = await to_answer(events(*SAID), stream())
    assert [line["done"] for line in (*said, last, full)] == [False] * 5 + [True, True]
    assert (
        "".join(line["message"]["content"] for line in said) == full["message"]["content"] == "So: "
    )
    thoughts = [line["message"].get("thinking", "") for line in said]
    assert "".join(thoughts) == full["message"]["thinking"] == "I look."
    calls = [call for line in said for call in line["message"].get("tool_calls", ())]
    function = {"name": "f", "arguments": {"a": [1]}, "index": 0}
    assert calls == full["message"]["tool_calls"] == [{"id": "call_1", "function": function}]
    for end in (last, full):
        assert (end["prompt_eval_count"], end["eval_count"], end["done_reason"]) == (3, 6, "stop")
        names = ("total", "load", "prompt_eval", "eval")
        durations = [end[f"{name}_duration"] for name in names]
        assert durations == [3_750_000_000, 125_000_000, 1_000_000_000, 2_000_000_000]


async def test_a_call_that_was_cut_off_is_no_call() -> None:
    *said, last = await lines(*SAID[:6], end=Ended(index=0, reason="length", num_output=6))
    assert not any("tool_calls" in line["message"] for line in said)
    assert last["done_reason"] == "length"


async def test_a_prompts_text_stands_beside_the_model() -> None:
    first, last = await lines(Content("fox"), chats=False)
    assert first["response"] == "fox" and "message" not in first
    assert last["response"] == "" and last["done"]
