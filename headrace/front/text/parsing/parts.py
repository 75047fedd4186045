"""What a model's text falls apart into, and the sink that the grammars write into.

Joined over the whole answer, parts of one kind are the same however the text was cut into pieces.
Calls have contiguous indices from 0; a later call never goes back to an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import msgspec

from headrace.front.text.guard import CLOSE, OPEN


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
    decoder is not."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, ValueError):
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
