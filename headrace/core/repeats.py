"""The end of an answer that goes round in a circle: its last tokens are one pattern, several times
over.

For each pattern size p it is counted for how many tokens in a row each was the one p tokens before
it: a pattern of p tokens stands there c times once that count is p * (c - 1). A token costs one
comparison of the last tokens with it (about 3 us at the greatest size), nothing is ever searched,
and requests that do not ask cost nothing.
"""

from __future__ import annotations

import numpy as np

from headrace.base.wire.repetition import RepetitionDetection

REASON = "repetition"
_SLIDES = 8  # so many windows are written before the newest is moved back


class Repeats:
    """One answer's repetitions. Its tokens are told one by one, in order; prompts do not count."""

    def __init__(self, rule: RepetitionDetection, *, min_tokens: int) -> None:
        self._size = rule.max_pattern_size
        self._first = max(rule.min_pattern_size, 1) - 1
        self._wanted = np.arange(1, self._size + 1) * (rule.min_count - 1)
        self._runs = np.zeros(self._size, np.int64)
        self._recent = np.full(
            self._size * _SLIDES, -1, np.int32
        )  # the newest first, from `_at` on
        self._at = len(self._recent) - self._size
        self._left = min_tokens

    def add(self, token: int) -> bool:
        """Whether the answer ends with this token."""
        recent = self._recent[self._at : self._at + self._size]
        self._runs += 1
        self._runs *= recent == token
        if self._at == 0:
            self._at = len(self._recent) - self._size
            self._recent[self._at :] = recent
        self._at -= 1
        self._recent[self._at] = token
        self._left -= 1
        met = self._runs[self._first :] >= self._wanted[self._first :]
        return self._left <= 0 and bool(met.any())
