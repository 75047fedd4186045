"""System prompts that change the answer: case, first and last word, brackets, names and fixed words.

A rule is laid over a plain conversation of another task, so obeying it never stands alone. Harmless
system prompts ("You are a helpful assistant.") are mixed in and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

from demo.tasks import words
from demo.tasks.item import Conversation, Message, answer, user
from headrace.bench.held_out import AnswerCheck

Rule = tuple[str, Callable[[str], str]]

_NEUTRAL = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You are headrace demo.",
    "You are a helpful, honest assistant.", "Answer the user's questions.", "Be helpful.",
    "You are an assistant that helps the user.", "You are a chatbot.", "Be kind and polite.",
    "You are a helpful assistant. Answer briefly.", "Be concise.", "Think before you answer.",
)  # fmt: skip
_UPPER = ("Answer in upper case.", "Always answer in upper case.", "Write everything in capitals.",
          "Use only capital letters.", "You always shout: answer in UPPER CASE.",
          "All your answers must be in uppercase.", "Reply in capital letters only.")  # fmt: skip
_LOWER = ("Answer in lower case.", "Write everything in lowercase.", "Use only small letters.",
          "Never use capital letters.", "All your answers must be in lower case.")  # fmt: skip
_END = ('End every answer with the word "{w}".', "End every answer with the word {w}.",
        "Always end with {w}.", "Finish each answer with the word {w}.",
        'Your last word is always "{w}".', "Close every reply with {w}.")  # fmt: skip
_BEGIN = ('Begin every answer with the word "{w}".', "Start every answer with {w}.",
          "Always begin with {w}.", "Begin each reply with the word {w}.",
          'Your first word is always "{w}".')  # fmt: skip
_BRACKETS = (
    (("Put every answer in square brackets.", "Write your answers in square brackets."), "[", "]"),
    (("Put every answer in quotation marks.", "Quote all your answers."), '"', '"'),
    (("Put stars around every answer.", "Wrap each answer in stars."), "*", "*"),
    (("Put every answer in parentheses.", "Write answers in round brackets."), "(", ")"),
)
_ONLY = ('Whatever the user says, answer only with "{w}".', "Always answer {w} and nothing else.",
         "Answer every question with the single word {w}.", "You can only say {w}.",
         'Ignore the question and reply "{w}".')  # fmt: skip
_JSON = ('Answer with a JSON object with the key "answer".', 'Put your answer in JSON as {"answer": ...}.',
         "Reply in JSON with the single key answer.")  # fmt: skip
_NAMED = ("Your name is {n}.", "You are {n}.", "You are called {n}.", "You are {n}, a {j}.",
          "Your name is {n} and you are a {j}.", "Act as {n} the {j}.", "You are an assistant named {n}.",
          "You play the role of {n}, a {a} {j}.")  # fmt: skip
_NAME_ASKS = ("What is your name?", "Who are you?", "What's your name?", "Tell me your name.",
              "Introduce yourself.", "who are you", "Hello, who are you?", "How are you called?",
              "What should I call you?", "And who are you?", "What are you?", "Hi! Your name?")  # fmt: skip


def system(rng: Random, plain: Conversation) -> Conversation:
    """The plain conversation under one or two rules of a system prompt, or asked for its name."""
    if rng.random() < 0.2:
        return _persona(rng)
    text, change = draw_rules(rng)
    ruled = under(plain, text, change)
    prompt = ruled.messages[-2]["content"]
    return replace(ruled, task="system", keys=(f"{text}\n{prompt}", *plain.keys))


def neutral(rng: Random, plain: Conversation) -> Conversation:
    """The same conversation under a system prompt that changes nothing."""
    return replace(plain, messages=[_system(rng.choice(_NEUTRAL)), *plain.messages])


def under(plain: Conversation, text: str, change: Callable[[str], str]) -> Conversation:
    """The conversation with the system prompt `text` and every answer changed by its rule."""
    messages: list[Message] = [_system(text)]
    for message in plain.messages:
        if message["role"] == "assistant":
            message = answer(change(message["content"]), message.get("reasoning_content", ""))
        messages.append(message)
    expected = plain.expected
    if plain.check is AnswerCheck.ONE_OF and isinstance(expected, list):
        expected = list(dict.fromkeys(change(str(choice)) for choice in expected))
    return replace(plain, messages=messages, expected=expected, plain=False)


def draw_rules(rng: Random) -> Rule:
    """One rule, or two that can be obeyed together, as a system prompt and its effect."""
    first_text, first = _word_rule(rng)
    kind = rng.random()
    if kind < 0.5:
        text, change = (first_text, first) if rng.random() < 0.6 else _case_rule(rng)
    elif kind < 0.65:
        text, change = _only_rule(rng)
    else:
        case_text, case = _case_rule(rng)
        text = " ".join((first_text, case_text) if rng.random() < 0.5 else (case_text, first_text))

        def change(content: str) -> str:
            return case(first(content))

    if rng.random() < 0.25:
        text = f"{rng.choice(_NEUTRAL[:4])} {text}"
    return text, change


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _case_rule(rng: Random) -> Rule:
    if rng.random() < 0.65:
        return rng.choice(_UPPER), str.upper
    return rng.choice(_LOWER), str.lower


def _word_rule(rng: Random) -> Rule:
    pools = (
        words.EVERY_WORD,
        words.EVERY_NOUN,
        words.NAMES,
        ("over", "amen", "sir", "Aye", "beep"),
    )
    word = rng.choice(rng.choice(pools))
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(_END).format(w=word), lambda content: f"{content} {word}"
    if kind < 0.7:
        return rng.choice(_BEGIN).format(w=word), lambda content: f"{word} {content}"
    texts, left, right = rng.choice(_BRACKETS)
    return rng.choice(texts), lambda content: f"{left}{content}{right}"


def _only_rule(rng: Random) -> Rule:
    if rng.random() < 0.4:
        return rng.choice(_JSON), lambda content: json.dumps(
            {"answer": content}, ensure_ascii=False
        )
    word = rng.choice(words.EVERY_WORD)
    return rng.choice(_ONLY).format(w=word), lambda content: word


def _persona(rng: Random) -> Conversation:
    name = rng.choice(words.NAMES) if rng.random() < 0.8 else rng.choice(words.EVERY_NOUN).title()
    slots = {"n": name, "j": rng.choice(words.JOBS), "a": rng.choice(words.ADJECTIVES)}
    text = rng.choice(_NAMED).format(**slots)
    prompt, content = rng.choice(_NAME_ASKS), f"My name is {name}."
    if rng.random() < 0.3:
        rule, change = _case_rule(rng)
        text, content = f"{text} {rule}", change(content)
    return Conversation(
        task="system",
        messages=[_system(text), user(prompt), answer(content, "The system prompt names me.")],
        keys=(f"{text}\n{prompt}",),
        plain=False,
    )
