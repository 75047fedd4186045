"""Requests that are pooled instead of continued, and what comes of them."""

from __future__ import annotations

import msgspec
import numpy as np

POOLINGS = ("cls", "last", "mean", "tokens", "lexical")


class RowPooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request that is pooled instead of continued wants of its hidden states.

    `how`: the first token's, the last one's, the mean from token `first` on, every token's, or
    "lexical": how much each word of the vocabulary weighs. `head`: one logit per label, by the
    model's head. `second_at`: where a pair's second text begins, for models with token types."""

    how: str = "last"
    head: bool = False
    second_at: int = 0
    first: int = 0

    @property
    def from_last(self) -> bool:
        """Whether the last token is enough, so that a cached prefix needs no computing."""
        return self.how == "last"


class Pooled(msgspec.Struct, frozen=True):
    """Hidden states of a request after pooling, float32 [rows, width]. With "tokens", row i belongs
    to the prompt's token `start` + i and a prompt may come in several parts; otherwise there is one
    row and `start` is 0."""

    start: int
    values: np.ndarray
