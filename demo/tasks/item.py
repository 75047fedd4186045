"""What a generator makes and what an evaluation asks: conversations, eval items and the split.

A conversation ends with the assistant's right answer. Training uses all of it; an eval item is the
same conversation without that answer. Which side a conversation belongs to is decided by a hash of
its keys (the problem itself, not its wording, where the problem is small), so a held-out problem
never occurs in training, whatever the seeds were.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from headrace.bench.held_out import AnswerCheck
from headrace.bench.scoring import FunctionCall

HELD_OUT_SHARE = 8
"""One key in so many is held out."""


class ToolCall(TypedDict):
    """One tool call in the shape of the OpenAI chat format."""

    type: str
    function: FunctionCall


class Message(TypedDict):
    """One chat message; `reasoning_content` is what stands between `<think>` and `</think>`."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


Tool = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A whole chat whose last message is the right answer.

    Every assistant message carries a thought; it is shown only where `thinking` says so.
    """

    task: str
    messages: list[Message]
    keys: tuple[str, ...]
    """The problem first, then what else must not be trained if it is held out."""
    expected: object = None
    """What the check compares with; None: the text of the last message."""
    check: AnswerCheck = AnswerCheck.EXACT
    tools: list[Tool] | None = None
    thinking: bool = False
    plain: bool = True
    """A single question and answer in words, to which a system rule may be added."""


def is_held_out(keys: tuple[str, ...]) -> bool:
    """Whether the first of the keys, which names the problem, belongs to the held-out side.

    A conversation without keys is common ground (a bare "Hello!") and always trained.
    """
    return bool(keys) and _held_out(keys[0])


def may_train(keys: tuple[str, ...]) -> bool:
    """Whether none of the keys belongs to the held-out side."""
    return not any(_held_out(key) for key in keys)


def user(content: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def answer(content: str, thought: str) -> Message:
    """A message of the assistant with the thought that leads to it."""
    return {"role": "assistant", "content": content, "reasoning_content": thought}


def _held_out(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
