"""The format that training writes is the one the shipped chat template writes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from demo.chat_format import pieces
from demo.tasks import training_conversation

MODEL = Path(__file__).parents[2] / "demo" / "model"


def rendered(messages: list[dict[str, object]], **variables: object) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    return environment.from_string(settings["chat_template"]).render(messages=messages, **variables)


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_training_text_is_what_the_template_renders(count: int) -> None:
    rng = Random(11)
    for _ in range(count):
        conversation = training_conversation(rng)
        messages = [dict(message) for message in conversation.messages]
        if not conversation.thinking:
            for message in messages:
                message.pop("reasoning_content", None)
        text = "".join(piece.text for piece in pieces(conversation))
        assert rendered(messages, tools=conversation.tools) == text + "\n"


def test_what_was_generated_is_a_prefix_of_the_next_prompt() -> None:
    first: list[dict[str, object]] = [{"role": "user", "content": "Hello!"}]
    prompt = rendered(first, add_generation_prompt=True)
    answered = [*first, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Bye"}]
    assert rendered(answered, add_generation_prompt=True).startswith(prompt + "Hi!<|im_end|>\n")


def test_thinking_leaves_the_block_to_the_model() -> None:
    asked: list[dict[str, object]] = [{"role": "user", "content": "1 + 1?"}]
    off = rendered(asked, add_generation_prompt=True)
    on = rendered(asked, add_generation_prompt=True, enable_thinking=True)
    assert off == on + "<think>\n\n</think>\n\n"


def test_pieces_tokenize_as_the_whole_text_does() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rng = Random(12)
    for _ in range(100):
        split = [piece.text for piece in pieces(training_conversation(rng))]
        whole = tokenizer.encode("".join(split)).ids
        assert [i for text in split for i in tokenizer.encode(text).ids] == whole
        assert tokenizer.decode(whole, skip_special_tokens=False) == "".join(split)


def test_digits_stay_single_and_markers_are_one_token() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]
    assert len(tokenizer.encode("<tool_call></tool_call><think></think>").ids) == 4
