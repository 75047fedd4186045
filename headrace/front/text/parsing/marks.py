"""Tells structural tokens from text that spells them.

Where a tag of the model's format is a control token of its vocabulary, only the token is structure.
Its piece is put between two of Unicode's noncharacters (tokenizer.py), which no other piece may
hold, and the family's tags are spelled the same way. So the grammars stay grammars over text, and a
model that quotes what a user typed makes no call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from headrace.front.text.tokenizer import CLOSE, OPEN, Pieces, Tokenizer, neutral

S = TypeVar("S", bound=msgspec.Struct)
Mark = Callable[[re.Match[str]], str]


class MarkedPieces(Pieces):
    """As `Pieces`, with `structural` tokens marked; they are shown whatever is skipped."""

    def __init__(
        self, tokenizer: Tokenizer, structural: dict[int, str], *, skip_special_tokens: bool
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._structural = structural

    def __missing__(self, token_id: int) -> str | bytes:
        text = self._structural.get(token_id)
        if text is not None:
            self[token_id] = f"{OPEN}{text}{CLOSE}"
            return self[token_id]
        piece = super().__missing__(token_id)
        if isinstance(piece, str):
            piece = self[token_id] = neutral(piece)
        return piece


class Marking:
    """Which tokens of one vocabulary are structure, gathered from the tags that are marked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = {
            i: tokenizer.token_bytes(i).decode("utf-8", "replace") for i in tokenizer.special_ids
        }
        self._ids = {text: i for i, text in texts.items() if len(text) > 1}
        longest = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest))) if longest else None
        self.structural: dict[int, str] = {}

    def struct(self, row: S) -> S:
        """`row` with every control token in its texts marked, which makes them structure."""
        return self._struct(row, self._mark)

    def known(self, row: S) -> S:
        """`row` with the tokens marked that are structure by now."""
        return self._struct(row, self._mark_known)

    def _struct(self, row: S, mark: Mark) -> S:
        fields = {name: getattr(row, name) for name in row.__struct_fields__}
        marked = {name: self._value(value, mark) for name, value in fields.items()}
        return msgspec.structs.replace(row, **marked)

    def _value(self, value: Any, mark: Mark) -> Any:
        if isinstance(value, str):
            return value if self._any is None else self._any.sub(mark, value)
        if isinstance(value, tuple):
            return tuple(self._value(one, mark) for one in value)
        return self._struct(value, mark) if isinstance(value, msgspec.Struct) else value

    def _mark(self, match: re.Match[str]) -> str:
        self.structural[self._ids[match[0]]] = match[0]
        return f"{OPEN}{match[0]}{CLOSE}"

    def _mark_known(self, match: re.Match[str]) -> str:
        is_known = self._ids[match[0]] in self.structural
        return f"{OPEN}{match[0]}{CLOSE}" if is_known else match[0]

    def pieces(self, *, skip_special_tokens: bool) -> MarkedPieces:
        """The table of pieces, once all rows are marked."""
        return MarkedPieces(
            self._tokenizer, self.structural, skip_special_tokens=skip_special_tokens
        )
