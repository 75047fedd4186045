from __future__ import annotations

import pytest

from headrace.base.errors import ConfigError
from headrace.front.text.parsing.families import (
    choose_reasoning,
    choose_tools,
    reasoning_family,
    tool_family,
)
from headrace.front.text.tokenizer import read_facts
from headrace.launch.locate import bundled_model


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "none", "none"),
        ("<tool_call> <think> </think>", "hermes", "qwen3"),
        ("<tool_call><function=f><parameter=p>", "qwen3_coder", "none"),
        ("<think></think><tool_call><arg_key><arg_value>", "glm45", "glm45"),
        ("<｜Assistant｜> split('</think>')", "none", "deepseek_r1"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
         "llama3_json", "none"),
        (None, "none", "none"),
    ],
)  # fmt: skip
def test_the_template_shows_the_formats(template: str | None, tools: str, reasoning: str) -> None:
    assert choose_tools(template).name == tools
    assert choose_reasoning(template).name == reasoning


def test_the_bundled_model_is_recognised() -> None:
    template = read_facts(bundled_model()).chat_template
    assert (choose_tools(template).name, choose_reasoning(template).name) == ("hermes", "qwen3")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--tool-parser: 'hermess' is not known; .*hermes"):
        tool_family("hermess")
    with pytest.raises(ConfigError, match=r"--reasoning-parser: .*qwen3"):
        reasoning_family("q")
    assert tool_family("none") is None and reasoning_family("none") is None


@pytest.mark.parametrize(
    ("tail", "unfinished", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", None, True),
        ("assistant\n<think>\n\n</think>\n\n", None, False),
        ("assistant\n", None, False),
        ("assistant\n<think>\nso far", "<think>\nso far", True),
        ("<think>a</think>b", "<think>a</think>b", False),
        ("<think>\n", "", False),
    ],
)
def test_the_prompt_decides_whether_the_answer_begins_inside(
    tail: str, unfinished: str | None, inside: bool
) -> None:
    """REG-096, REG-098: only the turn that is being written counts."""
    family = reasoning_family("qwen3")
    assert family is not None
    assert family.tags.begins_inside(tail, unfinished=unfinished) is inside


def test_a_family_that_always_reasons_does_unless_the_prompt_closed_it() -> None:
    family = reasoning_family("deepseek_r1")
    assert family is not None
    assert family.tags.begins_inside("<｜Assistant｜>")
    assert not family.tags.begins_inside("<｜Assistant｜></think>")
