"""tekken.json, Mistral's own form of its byte-level vocabularies: control tokens come first, then
the others by rank."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import msgspec

from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_tiktoken import TiktokenTokenizer


class _Config(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct, frozen=True):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct, frozen=True):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] = []


def load_tekken(path: str) -> TiktokenTokenizer:
    """The vocabulary of a tekken.json file; CheckpointError says what is wrong with it."""
    file = Path(path)
    try:
        tekken = msgspec.json.decode(file.read_bytes(), type=_Tekken)
        count = tekken.config.default_num_special_tokens
        most = tekken.config.default_vocab_size - count
        ranks = {
            base64.b64decode(token.token_bytes, validate=True): count + token.rank
            for token in tekken.vocab
            if token.rank < most
        }
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise CheckpointError(f"{file.name}: {error}") from error
    named = {token.rank: token.token_str for token in tekken.special_tokens}
    special = {named.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(count)}
    return TiktokenTokenizer(ranks, special, tekken.config.pattern, read_facts(file.parent))
