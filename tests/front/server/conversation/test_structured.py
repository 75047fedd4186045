"""What a budget for thinking and a grammar ask of the engine, in every format of reasoning: what comes out is read back
by the same format (API-04, API-05, API-12)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import Json, Literal, Regex, Sequence
from headrace.front.server.conversation.request import ChatRequest
from headrace.front.server.conversation.structured import AnswerForm, form_of, structure_of
from headrace.front.text.parsing.families import REASONING_FAMILIES
from headrace.front.text.parsing.parser import AnswerFormat
from tests.front.text.parsing.golden import meaning, parse

THOUGHT, ANSWER = "I think so", '{"a": 1}'
FAMILIES = {row.name: row for row in REASONING_FAMILIES}
LEADS = {
    "gpt_oss": "<|channel|>final<|message|>",
    "inkling": "<|content_text|>",
    "kimi_k3": "<|open|>response<|sep|>",
}
"""What models write before their answer."""


def form(**fields: Any) -> AnswerForm:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return form_of(msgspec.convert(body, ChatRequest))


def tail_of(name: str) -> str:
    """How a prompt ends behind which the model has the word."""
    return {"gpt_oss": "<|start|>assistant", "inkling": "<|message_model|>"}.get(
        name, "assistant\n"
    )


def read(name: str, tail: str, text: str) -> tuple[str, str]:
    """Content and reasoning."""
    parser = AnswerFormat(reasoning=FAMILIES[name]).parser(prompt_tail=tail, schemas=None)
    assert parser is not None
    content, reasoning, calls, _ = meaning(parse(parser, [text]))
    assert not calls
    return content, reasoning


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_spent_budget_forces_ends_the_thought(name: str) -> None:
    answers = AnswerFormat(reasoning=FAMILIES[name])
    tail = tail_of(name)
    asked = form(thinking_token_budget=5)
    rule = structure_of(asked, answers, prompt_tail=tail).reasoning
    assert rule is not None and rule.budget == 5
    assert rule.inside or rule.may_open
    opened = "" if rule.inside else rule.open
    text = opened + THOUGHT + rule.close + LEADS.get(name, "") + ANSWER
    content, reasoning = read(name, tail, text)
    if FAMILIES[name].tags.kept:
        assert content == FAMILIES[name].tags.open + THOUGHT + rule.close + ANSWER
    else:
        assert (content, reasoning) == (ANSWER, THOUGHT)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grammar_begins_where_the_answer_does(name: str) -> None:
    """Behind the thought, in the message that holds the answer; what its text opens is not in the answer."""
    answers = AnswerFormat(reasoning=FAMILIES[name])
    tail = tail_of(name)
    made = structure_of(form(response_format={"type": "json_object"}), answers, prompt_tail=tail)
    rule, node = made.reasoning, made.grammar
    assert rule is not None
    lead = ""
    if isinstance(node, Sequence):
        first, node = node.items
        assert isinstance(first, Literal)
        lead = first.text
    assert isinstance(node, Json) and lead == LEADS.get(name, "")
    opened = "" if rule.inside else rule.open
    content, reasoning = read(name, tail, opened + THOUGHT + rule.close + lead + ANSWER)
    if not FAMILIES[name].tags.kept:
        assert (content, reasoning) == (ANSWER, THOUGHT)
    if rule.may_open:
        assert read(name, tail, lead + ANSWER) == (ANSWER, ""), "it need not think"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_has_closed_the_thought_leaves_no_more_of_it(name: str) -> None:
    tags = FAMILIES[name].tags
    made = structure_of(
        form(thinking_token_budget=5),
        AnswerFormat(reasoning=FAMILIES[name]),
        prompt_tail=f"{tail_of(name)}{tags.open}\n\n{tags.close}\n\n",
    )
    assert made.reasoning is not None
    assert not made.reasoning.inside and not made.reasoning.may_open


def test_a_prompt_that_has_begun_the_answer_is_not_told_to_begin_it_again() -> None:
    for name, lead in LEADS.items():
        made = structure_of(
            form(structured_outputs={"regex": "a"}),
            AnswerFormat(reasoning=FAMILIES[name]),
            prompt_tail=tail_of(name) + lead,
        )
        assert made.grammar == Regex("a")


def test_a_call_ends_the_thought_where_the_format_and_the_request_have_calls() -> None:
    asked = {"thinking_token_budget": 5, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for name in ("kimi_k2", "apertus"):
        answers = AnswerFormat(reasoning=FAMILIES[name])
        for fields, until in (
            (asked, FAMILIES[name].tags.until),
            ({**asked, "tool_choice": "none"}, ()),
            ({"thinking_token_budget": 5}, ()),
        ):
            rule = structure_of(form(**fields), answers, prompt_tail="").reasoning
            assert rule is not None and rule.until == until


def test_a_budget_needs_a_format_of_reasoning() -> None:
    with pytest.raises(InvalidRequest, match="thinking_token_budget: no reasoning format"):
        structure_of(form(thinking_token_budget=5), AnswerFormat(), prompt_tail="")


STRICT = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip


def test_a_strict_response_format_closes_its_objects() -> None:
    made = structure_of(form(response_format=STRICT), AnswerFormat(), prompt_tail="")
    assert isinstance(made.grammar, Json) and made.field == "response_format.json_schema.schema"
    assert msgspec.json.decode(made.grammar.schema)["additionalProperties"] is False
    loose = {**STRICT, "json_schema": {**STRICT["json_schema"], "strict": False}}
    made = structure_of(form(response_format=loose), AnswerFormat(), prompt_tail="")
    assert isinstance(made.grammar, Json)
    assert "additionalProperties" not in msgspec.json.decode(made.grammar.schema)


def test_two_ways_of_asking_exclude_each_other() -> None:
    """REG-102."""
    with pytest.raises(InvalidRequest, match="response_format: excludes structured_outputs"):
        structure_of(
            form(response_format=STRICT, structured_outputs={"regex": "a"}),
            AnswerFormat(),
            prompt_tail="",
        )
