"""The tasks of the bundled model: the same seed gives the same items, held-out stays held out."""

from __future__ import annotations

from random import Random

import pytest

from demo.freeze_held_out import frozen_items
from demo.tasks import EVAL_TASKS, generate_eval, training_conversation
from demo.tasks.draw import held_out_conversations
from demo.tasks.item import is_held_out, may_train
from headrace.bench.held_out import read_items

SHORT_TASKS = [task for task in EVAL_TASKS if not task.startswith("recall_")]


@pytest.mark.parametrize("task", SHORT_TASKS)
def test_same_seed_gives_the_same_items_and_another_seed_others(task: str) -> None:
    assert generate_eval(task, 5, 7) == generate_eval(task, 5, 7)
    assert generate_eval(task, 5, 7) != generate_eval(task, 5, 8)


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


def test_expected_arithmetic_is_arithmetic() -> None:
    for item in generate_eval("arithmetic", 100, 2):
        assert isinstance(item.expected, str)
        assert int(item.expected) in range(-99, 199)


@pytest.mark.parametrize("task", SHORT_TASKS)
def test_the_frozen_file_holds_what_the_generator_draws(task: str) -> None:
    assert read_items()[task] == frozen_items(task, 100, 0)
