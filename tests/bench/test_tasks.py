"""The tasks of the bundled model: the same seed gives the same items, held-out stays held out."""

from __future__ import annotations

import dataclasses
import json
from random import Random

import pytest

from headrace.bench.datasets.tasks import (
    EVAL_TASKS,
    Check,
    EvalItem,
    generate_eval,
    score,
    score_tool_calls,
    training_conversation,
    visible_text,
)
from headrace.bench.datasets.tasks.draw import held_out_conversations
from headrace.bench.datasets.tasks.item import is_held_out, may_train

SHORT_TASKS = [task for task in EVAL_TASKS if not task.startswith("recall_")]


def right_answer(item: EvalItem) -> str:
    """What the reference says, with the tool calls as the chat template writes them."""
    if item.check is not Check.TOOL_CALL:
        return item.reference
    assert isinstance(item.expected, list)
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in item.expected)


@pytest.mark.parametrize("task", SHORT_TASKS)
def test_same_seed_gives_the_same_items_and_another_seed_others(task: str) -> None:
    assert generate_eval(task, 5, 7) == generate_eval(task, 5, 7)
    assert generate_eval(task, 5, 7) != generate_eval(task, 5, 8)


@pytest.mark.parametrize("task", EVAL_TASKS)
def test_the_right_answer_scores_raw_and_parsed(task: str) -> None:
    for item in generate_eval(task, 3, 1):
        text = right_answer(item)
        assert score(item, text), (item, text)
        assert score(item, f"<think>\nSo be it.\n</think>\n\n{text}<|im_end|>\n"), item


@pytest.mark.parametrize("task", EVAL_TASKS)
def test_a_wrong_answer_scores_false(task: str) -> None:
    for item in generate_eval(task, 3, 1):
        text = right_answer(item)
        for wrong in ("", "I do not know.", text + " and more", text[: len(text) // 2]):
            assert not score(item, wrong) or wrong == text, (item, wrong)


def test_a_right_answer_inside_of_an_open_thought_is_no_answer() -> None:
    item = generate_eval("arithmetic", 1, 0)[0]
    assert not score(item, f"<think>\nIt is {item.expected}.")


def test_json_is_compared_by_value_and_type() -> None:
    item = generate_eval("json", 1, 0)[0]
    item = dataclasses.replace(item, expected={"a": 1, "b": [True, "x"]})
    assert score(item, '{ "b": [true, "x"],\n "a": 1 }')
    assert not score(item, '{"a": true, "b": [true, "x"]}')
    assert not score(item, '{"a": 1, "b": [1, "x"]}')
    assert not score(item, '{"a": 1, "b": [true, "x"], "c": 2}')
    assert not score(item, '{"a": 1, "b": [true, "x"]')


def test_tool_calls_are_compared_in_order_with_nothing_around_them() -> None:
    item = generate_eval("tool_call", 1, 0)[0]
    one = {"name": "f", "arguments": {"x": 1}}
    two = {"name": "g", "arguments": {}}
    item = dataclasses.replace(item, expected=[one, two])
    text = right_answer(item)
    assert score(item, text)
    assert not score(item, "Sure! " + text)
    assert not score(item, right_answer(dataclasses.replace(item, expected=[two, one])))
    assert score_tool_calls(
        item, [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    )
    assert not score_tool_calls(item, [{"name": "f", "arguments": {"x": 1}}])


def test_a_stammering_story_is_no_story() -> None:
    item = generate_eval("story", 1, 0)[0]
    assert score(item, item.reference)
    assert not score(item, item.reference.replace("The end.", "foxfox. The end."))
    assert not score(item, "The end.")


def test_training_never_sees_a_held_out_problem() -> None:
    held_out = {
        key
        for task in SHORT_TASKS
        for conversation in held_out_conversations(task, 40, 5)
        for key in conversation.keys[:1]
    }
    rng = Random(3)
    for _ in range(1500):
        conversation = training_conversation(rng)
        assert may_train(conversation.keys)
        assert not held_out.intersection(conversation.keys)


def test_a_sum_is_held_out_in_every_wording_and_order() -> None:
    asked = {item.messages[-1]["content"] for item in generate_eval("arithmetic", 200, 0)}
    assert len(asked) > 150
    for conversation in held_out_conversations("arithmetic", 50, 0):
        assert is_held_out(conversation.keys)
        assert len(conversation.keys) == 1


def test_training_is_the_same_for_the_same_seed() -> None:
    first, second = Random("a"), Random("a")
    assert [training_conversation(first) for _ in range(50)] == [
        training_conversation(second) for _ in range(50)
    ]


def test_thinking_is_asked_for_through_the_template() -> None:
    assert generate_eval("think", 1, 0)[0].template_kwargs == {"enable_thinking": True}
    assert generate_eval("copy", 1, 0)[0].template_kwargs == {"enable_thinking": False}


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(KeyError, match="juggling"):
        generate_eval("juggling", 1, 0)


def test_the_visible_text_ends_at_the_first_end_token() -> None:
    assert visible_text("<think>\na\n</think>\n\n b <|im_end|>\nc") == "b"


def test_expected_arithmetic_is_arithmetic() -> None:
    for item in generate_eval("arithmetic", 100, 2):
        assert isinstance(item.expected, str)
        assert int(item.expected) in range(-99, 199)
