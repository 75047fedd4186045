"""SentencePiece `.model` files, through the optional library `sentencepiece`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from headrace.base.errors import CheckpointError
from headrace.base.optional import require
from headrace.front.text.threads import refusing_failures
from headrace.front.text.tokenizer import (
    BREAK,
    CLOSE,
    OPEN,
    Guard,
    Tokenizer,
    TokenizerFacts,
    neutral,
)
from headrace.front.text.tokenizer_files import read_facts

_SPELLING = re.compile(f"{OPEN}(\\d+){CLOSE}")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Its control symbols are special; user-defined symbols are ordinary
    text."""

    drop_first_space = True

    def __init__(self, path: str, facts: TokenizerFacts) -> None:
        super().__init__(facts)
        library = require("sentencepiece", extra="tokenizers", purpose="a SentencePiece tokenizer")
        try:
            self._library = library.SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"tokenizer: {path}: {error}") from error
        self.num_ids = self._library.get_piece_size()
        self._pieces: list[str] = [self._library.id_to_piece(i) for i in range(self.num_ids)]
        self.special_ids = frozenset(
            i
            for i in range(self.num_ids)
            if self._library.is_control(i) or self._library.is_unknown(i)
        )
        self.longest_token = max(map(len, self._pieces), default=1)
        self._ids = {self._pieces[i]: i for i in self.special_ids}

    def token_id(self, token: str) -> int | None:
        piece_id: int = self._library.piece_to_id(token)
        return piece_id if self._pieces[piece_id] == token else None

    def vocabulary_token(self, token_id: int) -> str:
        return self._pieces[token_id] if 0 <= token_id < self.num_ids else ""

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.num_ids:
            return b""
        piece = self._pieces[token_id]
        if self._library.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return (
            piece.replace("▁", " ").encode() if token_id not in self.special_ids else piece.encode()
        )

    def _encode(self, text: str) -> list[int]:
        """The library's own default: as bare, with the begin-of-sequence id before it if there is
        one."""
        bos = self._library.bos_id()
        return [*([bos] if bos >= 0 else []), *self._encode_bare(text)]

    def _encode_bare(self, text: str) -> list[int]:
        return self.encode_guarded(neutral(text))

    def encode_plain(self, text: str) -> list[int]:
        with refusing_failures(text):
            ids: list[int] = self._library.encode(text)
        return ids

    def encode_guarded(self, text: str) -> list[int]:
        return encode_between(self.guard.resolve(text), list(self._ids.values()), self.encode_plain)

    @cached_property
    def guard(self) -> Guard:
        return Guard(self._ids)


def load_sentencepiece(path: str) -> SentencePieceTokenizer:
    """A `.model` file with what stands beside it."""
    return SentencePieceTokenizer(path, read_facts(Path(path).parent))


def encode_between(resolved: str, ids: list[int], encode: Callable[[str], list[int]]) -> list[int]:
    """Encodes a resolved text piece by piece: guarded spellings are the ids of their number, the
    rest is `encode`d."""
    token_ids: list[int] = []
    assert BREAK not in resolved
    for i, piece in enumerate(_SPELLING.split(resolved)):
        if i % 2:
            token_ids.append(ids[int(piece)])
        elif piece:
            token_ids.extend(encode(piece))
    return token_ids
