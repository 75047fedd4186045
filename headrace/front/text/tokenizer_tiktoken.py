"""tiktoken rank files (`*.tiktoken`, and Llama 3's `tokenizer.model`), through the optional library
`tiktoken`.

A rank file holds neither the pattern that cuts text into words nor the special tokens. The pattern
is that of cl100k (which Llama 3 and Qwen share but for the digits); the special tokens come from
tokenizer_config.json (`added_tokens_decoder`).
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import cached_property
from pathlib import Path

from headrace.base.config.kimi_audio import special_tokens
from headrace.base.errors import CheckpointError
from headrace.base.optional import require
from headrace.front.text.threads import refusing_failures
from headrace.front.text.tokenizer import (
    CLOSE,
    OPEN,
    Guard,
    Tokenizer,
    TokenizerFacts,
    neutral,
)
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_sentencepiece import encode_between

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


QWEN_1 = "qwen.tiktoken"
QWEN_1_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{i}|>" for i in range(205)),
)
"""Special tokens of Qwen 1, behind its ranks; no file of its checkpoints lists them."""


class TiktokenTokenizer(Tokenizer):
    """A byte-level vocabulary by rank. `special` maps the special tokens to their ids."""

    def __init__(
        self, ranks: dict[bytes, int], special: dict[str, int], pattern: str, facts: TokenizerFacts
    ) -> None:
        super().__init__(facts)
        library = require("tiktoken", extra="tokenizers", purpose="a tiktoken tokenizer")
        self._library = library.Encoding(
            "headrace", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes.update({token_id: token.encode() for token, token_id in special.items()})
        self._special = special
        self.special_ids = frozenset(special.values())
        self.num_ids = max(self._bytes, default=-1) + 1
        self.longest_token = max(map(len, self._bytes.values()), default=1)

    def token_id(self, token: str) -> int | None:
        if token in self._special:
            return self._special[token]
        return next((i for i, known in self._bytes.items() if known == token.encode()), None)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def _encode(self, text: str) -> list[int]:
        return self._encode_bare(text)

    def _encode_bare(self, text: str) -> list[int]:
        return self.encode_guarded(neutral(text))

    def encode_plain(self, text: str) -> list[int]:
        with refusing_failures(text):
            ids: list[int] = self._library.encode_ordinary(text)
        return ids

    def encode_guarded(self, text: str) -> list[int]:
        ids = [self._special[token] for token in self.guard.tokens]
        return encode_between(self.guard.resolve(text), ids, self.encode_plain)

    @cached_property
    def guard(self) -> Guard:
        return Guard(self._special)


def load_tiktoken(file: str) -> TiktokenTokenizer:
    """Reads a rank file and the special tokens beside it."""
    path = Path(file)
    facts = read_facts(path.parent)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise CheckpointError(f"{path.name}: line {number} is not base64 and a rank") from error
    digits = "1,3" if path.name == "tokenizer.model" else "1"
    special = _special_tokens(path.parent)
    if path.name == QWEN_1:
        special = {token: len(ranks) + i for i, token in enumerate(QWEN_1_TOKENS)} | special
    if path.name == "tiktoken.model":
        special = {**_kimi_audio_tokens(path.parent, len(ranks)), **special}
    return TiktokenTokenizer(ranks, special, _PATTERN % digits, facts)


def _kimi_audio_tokens(folder: Path, first: int) -> dict[str, int]:
    """Kimi-Audio's, behind its ranks; other models that have such a file cut text by another
    pattern, and are refused."""
    path = folder / "config.json"
    kind = json.loads(path.read_bytes()).get("model_type") if path.is_file() else None
    if kind != "kimi_audio":
        raise CheckpointError(
            f"tokenizer: {folder}/tiktoken.model of a model of type {kind!r:.40}: how it cuts text "
            "is not known; give its tokenizer.json",
            field="tokenizer",
        )
    return special_tokens(first)


def _special_tokens(folder: Path) -> dict[str, int]:
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return {}
    entries = json.loads(config.read_bytes()).get("added_tokens_decoder", {})
    special = {entry["content"]: int(token_id) for token_id, entry in entries.items()}
    if any(mark in token for token in special for mark in (OPEN, CLOSE)):
        raise CheckpointError("tokenizer_config.json: a token holds reserved characters")
    return special
