"""What the fake back gives to requests that are pooled: its states, spread over a width, stand for
hidden states.

h_ij = (state_i * (2j + 1) mod 2^64) / 2^63 - 1
"""

from __future__ import annotations

import numpy as np

from headrace.base.config.resolved import ModelSpec
from headrace.base.splitmix import U64
from headrace.base.wire.pooling import Pooled, RowPooling

DEFAULT_WIDTH = 16


class NullPooling:
    """One row that is pooled, as wide as a hidden state, or with the head as there are labels."""

    def __init__(self, model: ModelSpec, asked: RowPooling, num_prompt: int) -> None:
        size = model.num_labels if asked.head else model.config.get("hidden_size", DEFAULT_WIDTH)
        self._odd = 2 * np.arange(size, dtype=np.uint64) + np.uint64(1)
        self._how = asked.how
        self._first = asked.first
        self._num_prompt = num_prompt
        self._sum = np.zeros((1, len(self._odd)), np.float32)

    def take(self, states: U64, first: int) -> Pooled | None:
        """The vectors that the prompt's tokens from `first` on, with these states, bring to
        completion."""
        hidden = (states[:, None] * self._odd / 2.0**63 - 1).astype(np.float32)
        last = first + len(states) == self._num_prompt
        if self._how == "tokens":
            return Pooled(first, hidden)
        if self._how == "cls":
            return Pooled(0, hidden[:1]) if first == 0 else None
        if self._how == "last":
            return Pooled(0, hidden[-1:]) if last else None
        self._sum += hidden[max(0, self._first - first) :].sum(0)
        return Pooled(0, self._sum / (self._num_prompt - self._first)) if last else None
