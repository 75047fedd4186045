"""The state that reads content beside calls: the part that all grammars with tags share.

`opens` begin a call; `drop` are tags that only frame (a section of calls, an answer after
reasoning): they and the white space next to them are no content.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.front.text.parsing.engine import Modes, Outside, Sink, Tags


class CallReader(Modes):
    """Content, up to a tag that opens a call. Without tags all is content."""

    def __init__(self, sink: Sink, opens: Sequence[str], drop: Sequence[str] = ()) -> None:
        self._sink = sink
        self._outside = Outside(sink)
        self._drop = frozenset(drop)
        tags = list(dict.fromkeys([*opens, *drop]))
        self._opening = Tags(tags) if tags else None
        self._raw: list[str] = []
        self._mode = self._content

    def end(self, rest: str) -> None:
        """The answer is over: what is left is content."""
        self._outside.add(rest)
        self._outside.flush()

    def _content(self, text: str, at: int) -> int:
        if self._opening is None:
            self._outside.add(text[at:])
            return len(text)
        place, tag = self._opening.find(text, at)
        if place > at:
            self._outside.add(text[at:place])
        if tag in self._drop:
            self._outside.call()
        elif tag:
            self._raw = [tag]
            self._open(tag)
        return place + len(tag)

    def _open(self, tag: str) -> None:
        """A call may begin: the mode that reads it takes over."""
        raise AssertionError(f"no call begins with {tag!r}")

    def _refuse(self, piece: str = "") -> None:
        """No call after all: what was read of it is content."""
        self._raw.append(piece)
        self._outside.add("".join(self._raw))
        self._raw = []
        self._mode = self._content
