"""Judging an answer: the text a model produced against what the item expects.

The text may be raw (with `<think>` blocks, `<tool_call>` tags and end tokens) or what a server's
parsers left of it; tool calls that a server has already parsed go through `score_tool_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from headrace.bench.held_out import AnswerCheck, EvalItem

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_ENDS = ("<|im_end|>", "<|endoftext|>")


class FunctionCall(TypedDict):
    """The function a tool call names, with its arguments as an object."""

    name: str
    arguments: dict[str, object]


class Grade(NamedTuple):
    """What is right in an answer, of how much: of one, or of the words said."""

    right: int
    count: int


def grade(item: EvalItem, text: str) -> Grade:
    """How right the generated text is: wholly or not, and of speech by words."""
    if item.check is not AnswerCheck.WORDS:
        return Grade(int(score(item, text)), 1)
    said = words_of(item.expected)
    return Grade(max(0, len(said) - word_errors(said, words_of(text))), len(said))


def words_of(text: str) -> list[str]:
    """Its words in small letters, without the signs between them."""
    return re.findall(r"\w+(?:[:'’]\w+)*", text.lower())


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest words that must be put in, left out or changed (Levenshtein 1966)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, start=1):
            change = before + (word != other)
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, change)
    return row[-1]


def score(item: EvalItem, text: str) -> bool:
    """Whether the generated text is a right answer to the item."""
    visible = visible_text(text)
    if item.check is AnswerCheck.WORDS:
        return words_of(visible) == words_of(item.expected)
    if item.check is AnswerCheck.EXACT:
        return visible == item.expected
    if item.check is AnswerCheck.ONE_OF:
        assert isinstance(item.expected, list)
        return visible in item.expected
    if item.check is AnswerCheck.JSON:
        return _same(_parsed(visible), item.expected)
    if item.check is AnswerCheck.TOOL_CALL:
        calls = [_parsed(body) for body in _TOOL_CALL.findall(visible)]
        return not _TOOL_CALL.sub("", visible).strip() and _same(calls, item.expected)
    return _is_story(item, visible)


def score_tool_calls(item: EvalItem, calls: Sequence[FunctionCall]) -> bool:
    """Whether calls that were already parsed are the expected ones, in order."""
    named = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return _same(named, item.expected)


def visible_text(text: str) -> str:
    """The answer without its end token and without what stands before `</think>`."""
    for end in _ENDS:
        text = text.split(end, 1)[0]
    return text.rpartition("</think>")[2].strip()


def _parsed(body: str) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return _Unparsable()


def _same(answer: object, expected: object) -> bool:
    """Equality of JSON values that tells 1 from true; the order of keys does not matter."""
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(
            _same(answer[key], expected[key]) for key in expected
        )
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(_same, answer, expected))
    return isinstance(answer, bool) == isinstance(expected, bool) and answer == expected


def _is_story(item: EvalItem, text: str) -> bool:
    wanted = item.expected
    assert isinstance(wanted, list)
    used = set(re.findall(r"[a-z]+", text.lower()))
    return (
        text.endswith("The end.")
        and 200 <= len(text) <= 1500
        and all(str(word).lower() in used for word in wanted)
        and used <= item.vocabulary
    )


class _Unparsable:
    """Equal to nothing that JSON can say."""
