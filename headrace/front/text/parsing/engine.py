"""The incremental engine: text goes in as it comes, states consume it, parts come out.

A state is given the text and a position and returns how far it got; what it leaves (never more than
a tag that is still incomplete) is offered again with the next piece. Everything else is consumed at
once and never read again, so that the time is linear in the text, whatever the text is. States
write into a sink; joined over the whole answer, parts of one kind are the same however the text was
cut into pieces. Calls have contiguous indices from 0; a later call never goes back to an earlier
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import msgspec

from headrace.front.text.tokenizer import CLOSE, OPEN

MAX_NESTING = 500
"""Levels of arguments that clients' decoders read."""


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thinks."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of the answer itself."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """Call `index` begins: its id and the function's name are known, none of its arguments."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of call `index`, JSON text as it will be sent (serialised once)."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """Call `index` is complete. A call that the answer's end cuts off has none. `valid`: its
    arguments are a JSON object; what is not was passed on as the model wrote it."""

    index: int
    valid: bool = True


def unmarked(text: str) -> str:
    """`text` without the marks that tell structural tokens from text (marks.py)."""
    if text.isascii() or (OPEN not in text and CLOSE not in text):
        return text
    return text.replace(OPEN, "").replace(CLOSE, "")


Part: TypeAlias = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass(eq=False)
class Sink:
    """Collects parts. With `only_one_call` all that follows the end of the first call is dropped.
    `marked`: the text has marks (marks.py), which no part keeps."""

    new_id: Callable[[], str]
    only_one_call: bool = field(kw_only=True, default=False)
    marked: bool = field(kw_only=True, default=False)
    num_calls: int = field(init=False, default=0)
    num_complete: int = field(init=False, default=0)
    closed: bool = field(init=False, default=False)
    _parts: list[Part] = field(init=False, default_factory=list)
    _arguments: list[str] = field(init=False, default_factory=list)

    def add(self, part: Part) -> None:
        """One more part."""
        if not self.closed:
            self._parts.append(part)

    def begin(self, name: str, call_id: str = "") -> None:
        """A new call, with the id that the model wrote if it wrote one."""
        if not self.closed:
            self._parts.append(CallBegin(self.num_calls, call_id or self.new_id(), name))
            self.num_calls += 1
            self._arguments.clear()

    def arguments(self, text: str) -> None:
        """More of the open call's arguments."""
        if text:
            self.add(CallArguments(self.num_calls - 1, text))
            self._arguments.append(text)

    def end(self) -> None:
        """The open call is complete."""
        if not self.closed:
            valid = is_object(unmarked("".join(self._arguments)))
            self.add(CallEnd(self.num_calls - 1, valid))
            self.num_complete += 1
        self._arguments.clear()
        self.closed = self.only_one_call

    def take(self) -> list[Part]:
        """The parts since the last call, neighbours of one kind joined."""
        parts, self._parts = self._parts, []
        return _unmarked(joined(parts)) if self.marked else joined(parts)


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object that clients can read: one that nests too deeply for a
    decoder is not. Where Python's own ends differs: at a thousand levels up to 3.11, at ten
    thousand from 3.12 on."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
    if not isinstance(value, dict):
        return False
    return text.count("[") + text.count("{") <= MAX_NESTING or _nests_within(value, MAX_NESTING)


def _nests_within(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        both = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [one for inside in both for one in inside if isinstance(one, dict | list)]
        if not level:
            return True
    return False


def _unmarked(parts: list[Part]) -> list[Part]:
    """The parts without the marks of structural tokens, and without those that are nothing but
    marks."""
    plain: list[Part] = []
    for part in parts:
        if not isinstance(part, Reasoning | Content | CallArguments):
            plain.append(part)
        elif text := unmarked(part.text):
            same = text is part.text
            plain.append(part if same else msgspec.structs.replace(part, text=text))
    return plain


def joined(parts: list[Part]) -> list[Part]:
    """`parts` with neighbours of one kind joined."""
    if len(parts) < 2:
        return parts
    merged: list[Part] = []
    for kind, group in groupby(parts, key=type):
        run = list(group)
        first = run[0]
        if isinstance(first, Reasoning | Content):
            text = "".join(part.text for part in run)  # type: ignore[union-attr]  # of one kind
            merged.append(kind(text))
        elif isinstance(first, CallArguments):
            # no group spans two calls: the next one begins in between
            text = "".join(part.text for part in run)  # type: ignore[union-attr]  # of one kind
            merged.append(CallArguments(first.index, text))
        else:
            merged += run
    return merged


class State(Protocol):
    """One way to read text."""

    def step(self, text: str, at: int) -> int:
        """Consumes from `at`; the position it got to. No progress and no change of state: it needs
        more text."""
        ...

    def end(self, rest: str) -> None:
        """The answer is over and `rest` is what was left."""
        ...


class Engine:
    """Runs states over one answer. `consumed` counts the characters consumed before the text in
    hand."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.consumed = 0
        self._held = ""
        self._state: State | None = None

    def become(self, state: State) -> None:
        """The state that reads from here on."""
        self._state = state

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        text = self._held + text if self._held else text
        at = 0
        while at < len(text):
            state = self._state
            assert state is not None
            reached = state.step(text, at)
            if reached == at and state is self._state:
                break
            at = reached
        self._held = text[at:]
        self.consumed += at
        return self.sink.take()

    def finish(self) -> list[Part]:
        """The parts that the end of the answer completes."""
        assert self._state is not None
        rest, self._held = self._held, ""
        self._state.end(rest)
        return self.sink.take()


class Plain:
    """All text is content."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def step(self, text: str, at: int) -> int:
        """Takes everything."""
        self._sink.add(Content(text[at:]))
        return len(text)

    def end(self, rest: str) -> None:
        """Nothing is ever left."""
        assert not rest


class Modes:
    """A state made of modes, each a method that consumes text as `State.step` does."""

    _mode: Callable[[str, int], int]

    def step(self, text: str, at: int) -> int:
        """Runs mode after mode until the text is consumed or one needs more."""
        while at < len(text):
            mode = self._mode
            reached = mode(text, at)
            if reached == at and mode == self._mode:
                break
            at = reached
        return at


class Outside:
    """Content beside calls: white space next to a call belongs to the structure, any other is
    content."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space: list[str] = []
        self._after_call = False

    def add(self, text: str) -> None:
        """More content."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        body = text.rstrip()
        if body:
            self.flush()
            self._sink.add(Content(body))
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def call(self) -> None:
        """A call stands here."""
        self._space.clear()
        self._after_call = True

    def flush(self) -> None:
        """The white space held back is content."""
        if self._space:
            self._sink.add(Content("".join(self._space)))
            self._space.clear()


class Tags:
    """Finds the first of a few tags. No tag may lie inside another, except at its end."""

    def __init__(self, tags: Sequence[str]) -> None:
        assert tags and all(tags)
        for tag in tags:
            assert not any(tag in other and not other.endswith(tag) for other in tags), tags
        self._tags = tuple(tags)
        self._first = tuple({tag[0] for tag in tags})
        self._longest = max(map(len, tags))
        # literals only: nothing to backtrack into
        self._any = re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))

    def find(self, text: str, at: int, max_chars: int | None = None) -> tuple[int, str]:
        """Where the first tag stands, and which; or the place up to which there is surely none, and
        "".

        With `room` it looks no further than for a tag that begins within so many characters.
        """
        end = len(text) if max_chars is None else at + max_chars + self._longest
        match = self._any.search(text, at, end)
        if match:
            return match.start(), match[0]
        return (end if end < len(text) else self._unsure(text, at)), ""

    def _unsure(self, text: str, at: int) -> int:
        """Where a tag could begin whose end is still to come."""
        start = max(at, len(text) - self._longest + 1)
        if not any(text.find(first, start) >= 0 for first in self._first):
            return len(text)
        for place in range(start, len(text)):
            tail = text[place:]
            if any(tag.startswith(tail) for tag in self._tags):
                return place
        return len(text)


@lru_cache(maxsize=256)
def only(tag: str) -> Tags:
    """Finds one tag; made once for all answers."""
    return Tags([tag])


def skip_space(text: str, at: int) -> int:
    """The place of the next character that is no white space (JSON's)."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def literal(text: str, at: int, wanted: str) -> bool | None:
    """Whether `wanted` stands at `at`; None while it may still come."""
    if text.startswith(wanted, at):
        return True
    if len(text) - at >= len(wanted):
        return False
    return None if wanted.startswith(text[at:]) else False
