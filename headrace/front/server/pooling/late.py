"""Queries and documents of late-interaction checkpoints (ColBERT): prefix tokens, lengths,
expansion, skipped words.

The two sides of a pair are tokenized differently. Without what the checkpoint says of them (a plain
encoder whose caller asks for late interaction) both stay as they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.config.pooling import LateSpec
from headrace.base.errors import InvalidRequest
from headrace.front.text.tokenizer import Tokenizer


class Sides:
    """Both sides of a comparison."""

    def __init__(self, tokenizer: Tokenizer, late: LateSpec | None) -> None:
        self._tokenizer = tokenizer
        self._late = late

    def truncate(self, asked: int | None, *, is_document: bool) -> int | None:
        """How many tokens of a text are kept: what the caller asks for, no more than the
        checkpoint's own length."""
        if self._late is None:
            return asked
        most = self._late.document_tokens if is_document else self._late.query_tokens
        most -= self._prefix(is_document) is not None
        return most if asked in (None, -1) else min(most, asked or most)

    def prepared(self, ids: list[int], *, is_document: bool) -> list[int]:
        """A text's ids as the model was trained on them."""
        late = self._late
        if late is None:
            return ids
        prefix = self._prefix(is_document)
        if prefix is not None:
            ids = [*ids[:1], prefix, *ids[1:]]
        if late.expands and not is_document:
            mask = self._known(self._tokenizer.facts.special_tokens.get("mask_token", "[MASK]"))
            ids = ids + [mask] * (late.query_tokens - len(ids))
        return ids

    def compared(self, ids: list[int]) -> npt.NDArray[np.bool_]:
        """Which tokens of a document take part."""
        skipped = self._late.skipped if self._late is not None else ()
        numbers = [self._tokenizer.token_id(word) for word in skipped]
        return ~np.isin(np.asarray(ids), [number for number in numbers if number is not None])

    def _prefix(self, is_document: bool) -> int | None:
        assert self._late is not None
        text = self._late.document_prefix if is_document else self._late.query_prefix
        return self._known(text) if text else None

    def _known(self, token: str) -> int:
        token_id = self._tokenizer.token_id(token)
        if token_id is None:
            raise InvalidRequest(
                f"the model's vocabulary has no token {token!r}, which its checkpoint puts "
                "into every text",
                field="model",
            )
        return token_id
