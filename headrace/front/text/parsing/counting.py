"""How many tokens of an answer are reasoning: those that begin between the tags.

Counted on the tokens' own text, so that it does not matter whether a tag is one token or several,
whether the prompt opened it, or how the stream was cut.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterable, Mapping

_UTF8 = codecs.getincrementaldecoder("utf-8")


class ReasoningTokens:
    """The count of one answer. `pieces`: what each token adds to the text; `at`: characters counted
    so far."""

    def __init__(self, pieces: Mapping[int, str | bytes]) -> None:
        self._pieces = pieces
        self._decoder = _UTF8(errors="replace")
        self.at = 0
        self._starts: list[int] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """More tokens of the answer."""
        for token_id in token_ids:
            self._starts.append(self.at)
            piece = self._pieces[token_id]
            data = piece.encode() if isinstance(piece, str) else piece
            self.at += len(self._decoder.decode(data))

    def count(self, span: tuple[int, int | None] | None) -> int:
        """Tokens that begin inside of `span` (characters; an open end takes all that follow)."""
        if span is None:
            return 0
        begin, end = span
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        return max(0, last - bisect_left(self._starts, begin))
