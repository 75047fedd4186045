"""Finds stop strings in a text that comes in pieces.

The answer does not depend on how the text is cut: the match that ends first wins, the longest of
several that end at the same character. Only what may still become a stop string is held back. One
Knuth-Morris-Pratt automaton per string (Knuth, Morris, Pratt 1977) makes the time linear in the
text for any strings.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """A stop string that was found, and the text of the answer that was still held back."""

    stop: str
    text: str


class StopStrings:
    """Watches one answer. `include`: the stop string itself belongs to the answer."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """The text that is safe to send, or the match."""
        ends = [(end, -len(a.stop), a) for a in self._stops if (end := a.feed(text)) is not None]
        if ends:
            end, _, automaton = min(ends, key=lambda match: match[:2])
            whole = self._held + text[:end]
            self._held = ""
            return StopMatch(automaton.stop, self._answer(whole, automaton.stop))
        whole = self._held + text
        keep = max((automaton.matched for automaton in self._stops), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """The answer ended otherwise: what was held back."""
        held, self._held = self._held, ""
        return held

    def _answer(self, whole: str, stop: str) -> str:
        return whole if self._include else whole[: len(whole) - len(stop)]


class _Automaton:
    """One stop string; `matched` characters of it stand at the end of the text so far."""

    __slots__ = ("_fall", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop
        self.stop = stop
        self.matched = 0
        self._fall = _falls(stop)

    def feed(self, text: str) -> int | None:
        """The number of characters of `text` after which the stop string is complete, None if it is
        not."""
        stop, fall, matched = self.stop, self._fall, self.matched
        start = 0
        if not matched:
            start = text.find(stop[0])
            if start < 0:
                return None
        for i in range(start, len(text)):
            character = text[i]
            while matched and stop[matched] != character:
                matched = fall[matched - 1]
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return i + 1
        self.matched = matched
        return None


def _falls(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its
    suffix."""
    falls = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = falls[length - 1]
        length += stop[i] == stop[length]
        falls[i] = length
    return falls
