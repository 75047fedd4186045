"""Recall: one value asked back from a long text of many keys.

The text is a table of key-value lines in one of several notations, or sentences with the facts
strewn among filler. Lengths are aimed at in estimated tokens; the estimate is calibrated on the
bundled tokenizer and errs on the long side. Training asks several questions of one text, because a
single answer in eight thousand tokens teaches little.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from demo.tasks import words
from demo.tasks.item import Conversation, Message, answer, user
from demo.tasks.lists import code, sentence

_LINES = (
    "{k}: {v}", "{k} = {v}", "{k} -> {v}", "- {k}: {v}", "The code of {k} is {v}.", "{k} | {v}",
    "The value of {k} is {v}.", "{k} has the number {v}.", "* {k} is {v}", '"{k}": "{v}",',
    "Key {k} holds {v}.", "{k},{v}", "{k} {v}", "Remember: {k} means {v}.",
)  # fmt: skip
_ASKS = (
    "What is the value of {k}?", "What is {k}?", "What is the code of {k}?", "What does {k} hold?",
    "Look up {k}.", "Which value belongs to {k}?", "Tell me the value for {k}.", "{k}?",
    "Find {k} and give me its value.", "What was {k}?", "What value does {k} have?",
    "Give me the value stored under {k}.", "What is the number of {k}?",
)  # fmt: skip
_OPENINGS = (
    "Here is a list of keys and values.", "Remember these values:", "Here is a table.",
    "Read this list.", "Here are some facts.", "Keep this in mind:", "Data:", "Notes:", "",
)  # fmt: skip

SHORT, MIDDLE, LONG, FULL = 900, 1800, 3700, 7400
"""Estimated prompt tokens of the buckets."""
_QUESTION_TOKENS = 32


def recall(rng: Random) -> Conversation:
    """Recall from up to about a thousand tokens."""
    return _recall(rng, "recall", rng.randint(40, SHORT))


def recall_2k(rng: Random) -> Conversation:
    """Recall from about one to two thousand tokens."""
    return _recall(rng, "recall_2k", rng.randint(SHORT, MIDDLE))


def recall_4k(rng: Random) -> Conversation:
    """Recall from about two to four thousand tokens."""
    return _recall(rng, "recall_4k", rng.randint(MIDDLE, LONG))


def recall_8k(rng: Random) -> Conversation:
    """Recall from about four to eight thousand tokens."""
    return _recall(rng, "recall_8k", rng.randint(LONG, FULL))


def with_more_questions(rng: Random, conversation: Conversation, most: int) -> Conversation:
    """The same text with further questions, each answered in its turn, as far as 8k tokens allow."""
    pairs = conversation.expected
    assert isinstance(pairs, dict)
    messages: list[Message] = list(conversation.messages)
    room = int(8100 - _estimated_tokens(messages[0]["content"])) // _QUESTION_TOKENS
    chosen = rng.sample(sorted(pairs), max(0, min(most, room, len(pairs))))
    for key in chosen:
        messages.append(user(rng.choice(_ASKS).format(k=key)))
        messages.append(answer(pairs[key], f"I look for {key}."))
    return Conversation(
        task=conversation.task, messages=messages, keys=conversation.keys, plain=False
    )


def _recall(rng: Random, task: str, tokens: int) -> Conversation:
    new_key, new_value = _key_maker(rng), _value_maker(rng)
    pairs: dict[str, str] = {}
    lines: list[str] = []
    form = rng.choice(_LINES)
    filler = rng.random() < 0.3
    spent = 30.0
    while spent < tokens:
        if filler and rng.random() < 0.7:
            line = sentence(rng)
        else:
            key = new_key()
            if key in pairs:
                continue
            pairs[key] = new_value()
            line = form.format(k=key, v=pairs[key])
        lines.append(line)
        spent += _estimated_tokens(line)
    if not pairs:
        return _recall(rng, task, tokens + 40)
    asked = rng.choice(sorted(pairs))
    text = (" " if filler else "\n").join(lines)
    opening, question = rng.choice(_OPENINGS), rng.choice(_ASKS).format(k=asked)
    parts = [question, opening, text] if rng.random() < 0.1 else [opening, text, question]
    prompt = rng.choice(("\n", "\n\n")).join(part for part in parts if part)
    return Conversation(
        task=task,
        messages=[user(prompt), answer(pairs[asked], f"I look for {asked}.")],
        keys=(prompt,),
        expected=pairs,
        plain=False,
    )


def _key_maker(rng: Random) -> Callable[[], str]:
    kind = rng.randrange(5)
    if kind == 0:
        return lambda: f"{rng.choice(words.ADJECTIVES)}-{rng.choice(words.EVERY_NOUN)}"
    if kind == 1:
        return lambda: f"{rng.choice(words.COLORS)} {rng.choice(words.EVERY_NOUN)}"
    if kind == 2:
        return lambda: code(rng, 5)
    if kind == 3:
        return lambda: f"{rng.choice(words.NAMES)} of {rng.choice(words.CITIES)}"
    return lambda: f"{rng.choice(words.EVERY_NOUN)}{rng.randrange(100)}"


def _value_maker(rng: Random) -> Callable[[], str]:
    kind = rng.randrange(5)
    if kind == 0:
        return lambda: str(rng.randint(1000, 9999))
    if kind == 1:
        return lambda: str(rng.randint(10, 999999))
    if kind == 2:
        return lambda: rng.choice(words.EVERY_NOUN)
    if kind == 3:
        return lambda: code(rng, 4)
    return lambda: f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.EVERY_NOUN)}"


def _estimated_tokens(line: str) -> float:
    tokens = 1.0
    for chunk in _CHUNKS.findall(line):
        known = len(chunk) == 1 or chunk.lower() in _KNOWN
        tokens += 1.0 if known else 0.75 * len(chunk)
    return tokens


_CHUNKS = re.compile(r"[A-Za-z]+|\d|[^\w\s]+")
_KNOWN = frozenset(
    word.lower()
    for text in (*words.EVERY_WORD, *words.NAMES, *words.CITIES, *words.JOBS, *_LINES)
    for word in _CHUNKS.findall(text)
) | {
    "in",
    "the",
    "with",
    "would",
    "over",
    "near",
    "every",
    "nobody",
    "saw",
    "stood",
    "sold",
    "found",
}
