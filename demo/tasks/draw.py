"""Drawing conversations: which tasks there are, how often training sees them, and the two sides.

The weights are shares of conversations, not of tokens. Training adds what evaluation does not need:
chats of several turns, system prompts laid over other tasks, tools that do not help, and several
questions about one long text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import cast

from demo.tasks import (
    chat,
    json_objects,
    lists,
    numbers,
    recall,
    stories,
    system,
    tools,
)
from demo.tasks.item import (
    Conversation,
    Message,
    is_held_out,
    may_train,
)
from headrace.bench.held_out import AnswerCheck, EvalItem

Generator = Callable[[Random], Conversation]


def _system(rng: Random) -> Conversation:
    return system.system(rng, _plain(rng))


TASKS: dict[str, Generator] = {
    "copy": lists.copy,
    "recall": recall.recall,
    "recall_2k": recall.recall_2k,
    "recall_4k": recall.recall_4k,
    "recall_8k": recall.recall_8k,
    "arithmetic": numbers.arithmetic,
    "arithmetic_3": numbers.arithmetic_3,
    "multiply": numbers.multiply,
    "compare": numbers.compare,
    "sort": lists.sort,
    "count": lists.count,
    "reverse": lists.reverse,
    "pick": lists.pick,
    "sequence": lists.sequence,
    "tool_call": tools.tool_call,
    "tool_answer": tools.tool_answer,
    "json": json_objects.json_object,
    "system": _system,
    "think": numbers.think,
    "story": stories.story,
    "chat": chat.chat,
}
EVAL_TASKS = tuple(TASKS)
"""Every task can be evaluated; the model card names those that the bar is set on."""

_SHARES = {
    "copy": 11, "recall": 5, "recall_2k": 0.9, "recall_4k": 0.5, "recall_8k": 0.5, "arithmetic": 9,
    "arithmetic_3": 4, "multiply": 7, "compare": 2, "sort": 6, "count": 7, "reverse": 2, "pick": 3, "sequence": 1.5,
    "tool_call": 11, "tool_answer": 4, "json": 8, "system": 8, "think": 4, "story": 5, "chat": 8,
}  # fmt: skip
_NAMES, _WEIGHTS = list(_SHARES), list(_SHARES.values())
_PLAIN_NAMES = ("arithmetic", "chat", "chat", "chat", "sort", "count", "pick", "compare", "multiply",
                "copy", "reverse", "sequence")  # fmt: skip

_MORE_QUESTIONS = {"recall": 4, "recall_2k": 12, "recall_4k": 24, "recall_8k": 40}
_ANSWER_TOKENS = {"think": 400, "story": 400, "tool_call": 256, "json": 256, "copy": 384}


def training_conversation(rng: Random) -> Conversation:
    """The next training conversation; none of its problems is held out."""
    while True:
        conversation = _varied(rng, TASKS[rng.choices(_NAMES, _WEIGHTS)[0]](rng))
        if may_train(conversation.keys):
            return conversation


def generate_eval(task: str, count: int, seed: int) -> list[EvalItem]:
    """`count` held-out items of the task; the same seed gives the same items.

    Raises KeyError for a task that is not in `EVAL_TASKS`.
    """
    return [_eval_item(chat) for chat in held_out_conversations(task, count, seed)]


def held_out_conversations(task: str, count: int, seed: int) -> list[Conversation]:
    """The held-out conversations, right answers included, behind `generate_eval`."""
    generator = TASKS[task]
    rng = Random(f"headrace {task} {seed}")
    found: list[Conversation] = []
    while len(found) < count:
        conversation = generator(rng)
        if is_held_out(conversation.keys):
            found.append(conversation)
    return found


def _eval_item(conversation: Conversation) -> EvalItem:
    last = conversation.messages[-1]
    asked = [dict(message) for message in conversation.messages[:-1]]
    for message in asked:
        message.pop("reasoning_content", None)
    expected = conversation.expected
    if conversation.check is AnswerCheck.EXACT:
        expected = last["content"]
    return EvalItem(
        task=conversation.task,
        messages=asked,
        tools=conversation.tools,
        thinking=conversation.thinking,
        expected=expected,
        check=conversation.check,
        max_tokens=_ANSWER_TOKENS.get(conversation.task, 128),
        reference=last["content"],
        vocabulary=stories.STORY_WORDS if conversation.check is AnswerCheck.STORY else frozenset(),
    )


def _varied(rng: Random, conversation: Conversation) -> Conversation:
    if conversation.task in _MORE_QUESTIONS:
        most = _MORE_QUESTIONS[conversation.task]
        conversation = recall.with_more_questions(rng, conversation, rng.randint(most // 2, most))
    elif conversation.plain:
        kind = rng.random()
        if kind < 0.12:
            conversation = _chained(rng, conversation)
        elif kind < 0.17:
            conversation = tools.with_unused_tools(rng, conversation)
    if conversation.messages[0]["role"] != "system" and rng.random() < 0.15:
        conversation = system.neutral(rng, conversation)
    if not conversation.thinking and rng.random() < 0.12:
        conversation = replace(conversation, thinking=True)
    if conversation.thinking and rng.random() < 0.5:
        conversation = replace(conversation, messages=_forgetful(conversation.messages))
    return conversation


def _forgetful(messages: list[Message]) -> list[Message]:
    """The messages without earlier thoughts: most clients do not send them back."""
    kept = [dict(message) for message in messages]
    for message in kept[:-1]:
        message.pop("reasoning_content", None)
    return cast(list[Message], kept)


def _chained(rng: Random, first: Conversation) -> Conversation:
    """Several plain conversations in one, sometimes all under one system rule."""
    messages: list[Message] = list(first.messages)
    keys = list(first.keys)
    for _ in range(rng.randint(1, 3)):
        other = stories.story(rng) if rng.random() < 0.1 else _plain(rng)
        messages.extend(other.messages)
        keys.extend(other.keys)
    chain = replace(first, task="chain", messages=messages, keys=tuple(keys), plain=False)
    if rng.random() < 0.3:
        return system.under(chain, *system.draw_rules(rng))
    return chain


def _plain(rng: Random) -> Conversation:
    return TASKS[rng.choice(_PLAIN_NAMES)](rng)
