"""What LLM.chat and the terminal tell apart: reasoning, content, calls."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.base.config.resolved import TextSpec
from headrace.base.wire.request import SamplingParams
from headrace.front.client.chat_output import ChatOutput, ChatOutputParser
from headrace.front.text.tokenizer_files import load_tokenizer

DEMO = Path(__file__).parents[3] / "demo" / "model"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
TEXT = (
    "<think>one\ntwo</think>\n\nIt is 3."
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def listener() -> ChatOutputParser:
    text = TextSpec(
        tokenizer_path=str(DEMO),
        chat_template=None,
        model_names=("m",),
        generation_defaults={},
        logits_width=4096,
        eos_ids=(),
        max_model_len=100,
        tool_parser="hermes",
        reasoning_parser="qwen3",
    )
    return ChatOutputParser(text, load_tokenizer(str(DEMO)))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_falls_into_the_same_parts_however_it_is_cut(
    listener: ChatOutputParser, size: int
) -> None:
    parser = listener.parser([5, 6], tools=[TOOL])
    spoken = ChatOutput()
    for at in range(0, len(TEXT), size):
        spoken.add(parser.push(TEXT[at : at + size]))
    spoken.add(parser.finish())
    assert (spoken.reasoning.strip(), spoken.content.strip()) == ("one\ntwo", "It is 3.")
    (call,) = spoken.tool_calls
    assert (call.name, msgspec.json.decode(call.arguments)) == ("add", {"a": 1})
    message = spoken.message()
    assert message["tool_calls"][0]["function"]["name"] == "add" and "one" not in str(message)


def test_without_tools_nothing_is_a_call(listener: ChatOutputParser) -> None:
    spoken = listener.whole(listener.parser([5, 6]), TEXT)
    assert spoken.tool_calls == [] and "add" in spoken.content


def test_a_model_whose_format_is_not_known_only_says_things() -> None:
    tokenizer = load_tokenizer(str(DEMO))
    spec = TextSpec(
        tokenizer_path=str(DEMO),
        chat_template=None,
        model_names=("m",),
        generation_defaults={},
        logits_width=4096,
        eos_ids=(),
        max_model_len=100,
    )
    plain = ChatOutputParser(spec, tokenizer)
    assert plain.whole(plain.parser([5]), TEXT).content == TEXT
    assert plain.generation([5], SamplingParams()).pieces is None
