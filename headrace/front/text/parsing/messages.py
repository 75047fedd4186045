"""What is common to answers that are a row of messages: reasoning, content and calls, in any order
and number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from headrace.front.text.parsing.engine import Content, Engine, Modes, Reasoning


class Kind(Enum):
    """What a message is."""

    REASONING = 1
    CONTENT = 2
    CALL = 3


class Messages(Modes, ABC):
    """The base of such states. `spans`: where reasoning stands, in characters; `over`: no more of
    it is expected."""

    def __init__(self, engine: Engine) -> None:
        self.spans: list[tuple[int, int | None]] = []
        self.over = False
        self._engine = engine
        self._sink = engine.sink
        self._kind = Kind.CONTENT
        self._said: set[Kind] = set()
        self._fresh = True

    @abstractmethod
    def end(self, rest: str) -> None:
        """See State."""

    def _begin_message(self, kind: Kind, at: int) -> None:
        """A message whose text begins at character `at` of the answer."""
        self._kind = kind
        self._fresh = True
        if kind is Kind.REASONING:
            self.spans.append((at, None))

    def _end_message(self, at: int) -> None:
        """Its text ended before character `at`."""
        if self._kind is Kind.REASONING:
            self.spans[-1] = (self.spans[-1][0], at)

    def _say(self, text: str) -> None:
        """More reasoning or content; messages of one kind are kept apart by a line break."""
        if not text:
            return
        if self._fresh and self._kind in self._said:
            text = "\n" + text
        self._fresh = False
        self._said.add(self._kind)
        self._sink.add(Reasoning(text) if self._kind is Kind.REASONING else Content(text))
