"""What each reasoning format writes, under every name it goes by, however the prompt ends (API-07); the parsers are
made and run without the tokenizer, so that requests beside each other cannot get in its way (API-11, REG-101)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.text.parsing.families import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    reasoning_family,
)
from headrace.front.text.parsing.parser import AnswerFormat, OutputParser
from headrace.front.text.tokenizer import Tokenizer
from tests.front.text.parsing.golden import SCHEMAS, meaning, parse
from tests.front.text.parsing.test_parser import cut


class Format(NamedTuple):
    """The tags around a thought and the answer, and how a prompt ends that has opened or closed the reasoning."""

    begin: str
    end: str
    opened: str
    closed: str
    answer: str = "{}"


THINK = Format("<think>\n", "\n</think>\n\n", "assistant\n<think>\n", "<think>\n\n</think>\n\n")
FORMATS: dict[str, Format] = {
    **dict.fromkeys(
        ["qwen3", "step3p5", "holo2", "mimo", "poolside_v1", "glm45", "glm47", "kimi_k2", "olmo3"],
        THINK,
    ),
    **dict.fromkeys(["nemotron_v3", "hy_v3"], THINK),
    "hy_v3_opensource": Format(
        "<think:opensource>", "</think:opensource>",
        "<think:opensource>", "<think:opensource></think:opensource>",
    ),
    "kimi_k3": Format(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "minimax_m3": Format("<mm:think>", "</mm:think>", "<mm:think>", "</mm:think>"),
    "solar_open2": Format(
        "<|think:start|>", "<|think:end|>", "<|think:start|>", "<|think:start|><|think:end|>"
    ),
    "apertus": Format(
        "<|inner_prefix|>", "<|inner_suffix|>",
        "<|inner_prefix|>", "<|inner_prefix|><|inner_suffix|>",
    ),
    "inkling": Format(
        "<|content_thinking|>",
        "<|end_message|><|message_model|><|content_text|>",
        "<|message_model|><|content_thinking|>",
        "<|message_model|><|content_text|>",
        "{}<|end_message|>",
    ),
    **dict.fromkeys(["deepseek_r1", "deepseek_v3", "deepseek_v4", "minimax_m2", "step3"], THINK),
    "seed_oss": Format("<seed:think>", "</seed:think>", "<seed:think>", "<seed:think></seed:think>"),
    "mistral": Format("[THINK]", "[/THINK]", "[/INST][THINK]", "[THINK][/THINK]"),
    "gemma4": Format("<|channel>thought\n", "<channel|>", "<|channel>thought\n", "<channel|>"),
    **dict.fromkeys(
        ["cohere_command3", "cohere_command4"],
        Format(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|CHATBOT_TOKEN|><|START_THINKING|>",
            "<|START_THINKING|><|END_THINKING|>",
            "<|START_RESPONSE|>{}<|END_RESPONSE|>",
        ),
    ),
    "granite": Format(
        "Here is my thought process:", "Here is my response:",
        "assistant\nHere is my thought process:", "Here is my response:",
    ),
    "kimi": Format("◁think▷", "◁/think▷", "◁think▷", "◁think▷◁/think▷"),
    "hunyuan_a13b": Format(*THINK[:4], "<answer>\n{}\n</answer>"),
    "ernie45": Format(*THINK[:4], "<response>\n{}\n</response>\n"),
}  # fmt: skip
ALWAYS = {"deepseek_r1", "deepseek_v3", "deepseek_v4", "minimax_m2", "step3", "ernie45"}
WORDS = st.text(alphabet="ab é\U0001f600.,", min_size=1, max_size=20).map(lambda t: f"a{t}b")


def parser(name: str, prompt_tail: str) -> OutputParser:
    made = AnswerFormat(reasoning=reasoning_family(name)).parser(
        prompt_tail=prompt_tail, schemas=None
    )
    assert made is not None
    return made


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(
    thought=WORDS, said=WORDS, sizes=st.lists(st.integers(1, 16), min_size=1, max_size=8), how=st.data()
)  # fmt: skip
def test_thought_and_answer_are_told_apart(
    name: str, thought: str, said: str, sizes: list[int], how: st.DataObject
) -> None:
    form = FORMATS[name]
    answer = form.answer.format(said)
    cases = {
        "opened by the model": ("assistant\n", form.begin + thought + form.end + answer),
        "opened by the prompt": (form.opened, thought + form.end + answer),
        "closed by the prompt": (form.closed, answer),
        "never closed": (form.opened, thought),
        "without": ("assistant\n" if name not in ALWAYS else form.closed, answer),
    }
    case = how.draw(st.sampled_from(sorted(cases)))
    tail, text = cases[case]
    wants_thought = case not in ("closed by the prompt", "without")
    for pieces in ([text], cut(text, sizes)):
        content, reasoning, calls, _ = meaning(parse(parser(name, tail), pieces))
        assert reasoning.strip() == (thought if wants_thought else ""), case
        assert content.strip() == ("" if case == "never closed" else said), case
        assert not calls


def test_every_format_has_a_transcript() -> None:
    """The two that are not written with tags around a thought have theirs in golden.py."""
    elsewhere = {"gpt_oss", "minimax_m2_append_think"}
    named = {name for name in FORMATS for row in [reasoning_family(name)] if row is not None}
    shown = {row.name for name in named if (row := reasoning_family(name)) is not None}
    assert shown | elsewhere == {family.name for family in REASONING_FAMILIES}


def test_no_parser_asks_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """API-11: every pair of formats is made and parses an answer while any use of a tokenizer fails."""

    def used(*_: object, **__: object) -> None:
        raise AssertionError("a parser used the tokenizer")

    kinds = [Tokenizer, *Tokenizer.__subclasses__()]
    names = {n for kind in kinds for n in vars(kind) if "encode" in n or "decode" in n}
    assert {"encode", "encode_plain", "decode"} <= names
    for kind in kinds:
        for name in names & vars(kind).keys():
            monkeypatch.setattr(kind, name, used)
    for tools in TOOL_FAMILIES:
        for reasoning in (None, *REASONING_FAMILIES):
            form = AnswerFormat(tools=tools, reasoning=reasoning)
            made = form.parser(prompt_tail="assistant\n", schemas=SCHEMAS)
            assert made is not None
            parse(made, ["<think>", "x</think>", '<tool_call>{"name": "f", "arguments": {}}'])
