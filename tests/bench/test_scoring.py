"""Judging answers: what counts as right, raw and parsed."""

from __future__ import annotations

import json

import msgspec
import pytest

from headrace.bench.held_out import HEARD, AnswerCheck, EvalItem, read_items
from headrace.bench.scoring import (
    grade,
    score,
    score_tool_calls,
    visible_text,
    word_errors,
    words_of,
)

ITEMS = read_items()


def right_answer(item: EvalItem) -> str:
    """What the reference says, with the tool calls as the chat template writes them."""
    if item.check is not AnswerCheck.TOOL_CALL:
        return item.reference
    assert isinstance(item.expected, list)
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in item.expected)


def test_a_right_answer_inside_of_an_open_thought_is_no_answer() -> None:
    item = ITEMS["arithmetic"][0]
    assert not score(item, f"<think>\nIt is {item.expected}.")


def test_json_is_compared_by_value_and_type() -> None:
    item = ITEMS["json"][0]
    item = msgspec.structs.replace(item, expected={"a": 1, "b": [True, "x"]})
    assert score(item, '{ "b": [true, "x"],\n "a": 1 }')
    assert not score(item, '{"a": true, "b": [true, "x"]}')
    assert not score(item, '{"a": 1, "b": [1, "x"]}')
    assert not score(item, '{"a": 1, "b": [true, "x"], "c": 2}')
    assert not score(item, '{"a": 1, "b": [true, "x"]')


def test_tool_calls_are_compared_in_order_with_nothing_around_them() -> None:
    item = ITEMS["tool_call"][0]
    one = {"name": "f", "arguments": {"x": 1}}
    two = {"name": "g", "arguments": {}}
    item = msgspec.structs.replace(item, expected=[one, two])
    text = right_answer(item)
    assert score(item, text)
    assert not score(item, "Sure! " + text)
    assert not score(item, right_answer(msgspec.structs.replace(item, expected=[two, one])))
    assert score_tool_calls(
        item, [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    )
    assert not score_tool_calls(item, [{"name": "f", "arguments": {"x": 1}}])


def test_a_stammering_story_is_no_story() -> None:
    item = ITEMS["story"][0]
    assert score(item, item.reference)
    assert not score(item, item.reference.replace("The end.", "foxfox. The end."))
    assert not score(item, "The end.")


def test_the_visible_text_ends_at_the_first_end_token() -> None:
    assert visible_text("<think>\na\n</think>\n\n b <|im_end|>\nc") == "b"


@pytest.mark.parametrize("task", list(ITEMS))
def test_the_right_answer_scores_raw_and_parsed(task: str) -> None:
    for item in ITEMS[task][:3]:
        text = right_answer(item)
        assert score(item, text), (item, text)
        assert score(item, f"<think>\nSo be it.\n</think>\n\n{text}<|im_end|>\n"), item


@pytest.mark.parametrize("task", list(ITEMS))
def test_a_wrong_answer_scores_false(task: str) -> None:
    for item in ITEMS[task][:3]:
        text = right_answer(item)
        for wrong in ("", "I do not know.", text + " and more", text[: len(text) // 2]):
            assert not score(item, wrong) or wrong == text, (item, wrong)


def test_of_speech_words_are_counted_without_signs_and_case() -> None:
    assert words_of(" Um 7:45, ÖFFNE die Tür!") == ["um", "7:45", "öffne", "die", "tür"]
    assert word_errors([], ["a", "b"]) == 2 and word_errors(["a", "b"], []) == 2
    assert word_errors(["the", "cat", "sat", "here"], ["a", "cat", "sat"]) == 2
    assert word_errors(["a", "b", "c", "d"], ["b", "c", "d", "a"]) == 2
    item = read_items(HEARD)["en"][0]
    item = msgspec.structs.replace(item, expected="Open the window.")
    assert grade(item, " open the") == (2, 3)
    assert grade(item, " open the window") == (3, 3) and score(item, "Open, the window")
    assert grade(item, " a b c d e f g") == (0, 3)


def test_what_is_not_speech_is_right_or_wrong() -> None:
    item = ITEMS["copy"][0]
    assert grade(item, right_answer(item)) == (1, 1) and grade(item, "no") == (0, 1)
