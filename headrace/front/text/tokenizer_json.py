"""tokenizer.json, through the `tokenizers` library.

Three instances share one file: the vocabulary as it is; one that knows no control token, for
ordinary text; and one in which every control token is spelled in the private way of `Guard`, for
rendered templates. Renaming the tokens, and not switching their recognition off, also keeps
vocabularies apart that would find a control token by merging.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headrace.base.errors import CheckpointError
from headrace.front.text.threads import refusing_failures
from headrace.front.text.tokenizer import (
    Guard,
    Tokenizer,
    TokenizerFacts,
    neutral,
)
from headrace.front.text.tokenizer_files import read_facts

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# Non-special added tokens that a template uses as markup (<think>, <tool_call>, [INST], ◁think▷,
# ]<]minimax[>[).
_MARKUP = re.compile(r"(?:<\S+>|\[\S+\]|◁\S+▷|\]\S+\[)\Z")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json document and what stands beside it."""

    def __init__(self, document: str, facts: TokenizerFacts) -> None:
        super().__init__(facts)
        self._document = document
        try:
            self._library = tokenizers.Tokenizer.from_str(document)
            self._parsed: dict[str, Any] = json.loads(document)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json: {error}") from error
        self._library.no_truncation()
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in vocabulary.items()}
        self.num_ids = max(self._tokens, default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)
        self._decoder = _decoder_kind(self._parsed.get("decoder"))
        self.drop_first_space = self._decoder.drop_first_space

    def token_id(self, token: str) -> int | None:
        token_id_or_none: int | None = self._library.token_to_id(token)
        return token_id_or_none

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokens.get(token_id)
        return b"" if token is None else self._decoder.token_bytes(token)

    def vocabulary_token(self, token_id: int) -> str:
        return self._tokens.get(token_id, "")

    def _encode(self, text: str) -> list[int]:
        return _ids(self._library, text, add_special_tokens=True)

    def _encode_bare(self, text: str) -> list[int]:
        return _ids(self._library, text)

    def encode_pair(
        self, first: str, second: str, *, second_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """As the vocabulary's own post-processor joins pairs."""
        with refusing_failures(first + second):
            one = self._library.encode(first, add_special_tokens=False)
            two = self._library.encode(second, add_special_tokens=False)
            if second_tokens is not None:
                two.truncate(second_tokens)
            pair = self._library.post_process(one, two, add_special_tokens=True)
        types = pair.type_ids
        return pair.ids, types.index(1) if 1 in types else 0

    def encode_plain(self, text: str) -> list[int]:
        return _ids(self._guarded, neutral(text))

    def encode_guarded(self, text: str) -> list[int]:
        return _ids(self._guarded, self.guard.resolve(text), field="messages")

    @cached_property
    def guard(self) -> Guard:
        template = self.facts.chat_template or ""
        special = [self._added[token_id] for token_id in sorted(self.special_ids)]
        others = [
            token for token_id, token in self._added.items() if token_id not in self.special_ids
        ]
        return Guard(special, [t for t in others if _MARKUP.match(t) and t in template])

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        """The vocabulary with its control tokens respelled; ids stay what they are."""
        spellings = self.guard.spellings
        added = [
            {**token, "content": spellings.get(token["content"], token["content"])}
            for token in self._parsed.get("added_tokens", [])
        ]
        model = _respelled(self._parsed["model"], spellings)
        document = {**self._parsed, "added_tokens": added, "model": model, "post_processor": None}
        guarded = tokenizers.Tokenizer.from_str(json.dumps(document))
        guarded.no_truncation()
        guarded.no_padding()
        for token, spelling in spellings.items():
            same = guarded.token_to_id(spelling) == self._library.token_to_id(token)
            assert same, f"respelled token {token!r} changed its id"
        return guarded


def load_json(path: str) -> JsonTokenizer:
    """A tokenizer.json file with what stands beside it."""
    file = Path(path)
    return JsonTokenizer(file.read_text(encoding="utf-8"), read_facts(file.parent))


def _ids(
    library: tokenizers.Tokenizer,
    text: str,
    *,
    add_special_tokens: bool = False,
    field: str = "prompt",
) -> list[int]:
    """The ids of one text. The library lets other threads run only in its batch calls (200,000
    characters hold the interpreter for 65 ms otherwise); the fast one counts no offsets."""
    with refusing_failures(text, field=field):
        (encoding,) = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _respelled(model: dict[str, Any], spellings: dict[str, str]) -> dict[str, Any]:
    """The model with renamed tokens; merges that would make one of them are left out."""
    respelled, vocabulary = dict(model), model.get("vocab")
    if isinstance(vocabulary, dict):
        respelled["vocab"] = {spellings.get(token, token): i for token, i in vocabulary.items()}
    elif isinstance(vocabulary, list):
        respelled["vocab"] = [[spellings.get(token, token), score] for token, score in vocabulary]
    if "unk_token" in model:
        respelled["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        respelled["merges"] = [
            m for m in model["merges"] if spellings.keys().isdisjoint(_merged(m))
        ]
    return respelled


def _merged(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


class _ByteLevel:
    """Byte-level BPE: every character of a token stands for one byte (GPT-2's
    `bytes_to_unicode`)."""

    drop_first_space = False

    def __init__(self) -> None:
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in set(plain)]
        self._table = {byte: byte for byte in plain} | {
            256 + i: byte for i, byte in enumerate(others)
        }

    def token_bytes(self, token: str) -> bytes:
        if any(ord(character) not in self._table for character in token):
            return token.encode()
        return bytes(self._table[ord(character)] for character in token)


class _SentencePiece:
    """SentencePiece-like vocabularies: "▁" is a space, <0xNN> is a byte."""

    def __init__(self, *, drop_first_space: bool, byte_fallback: bool) -> None:
        self.drop_first_space = drop_first_space
        self._byte_fallback = byte_fallback

    def token_bytes(self, token: str) -> bytes:
        byte = _BYTE_PIECE.match(token) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


class _Suffixed:
    """BPE with an end-of-word suffix, and plain vocabularies (suffix "")."""

    drop_first_space = False

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def token_bytes(self, token: str) -> bytes:
        if self._suffix and token.endswith(self._suffix):
            return (token.removesuffix(self._suffix) + " ").encode()
        return token.encode()


class _WordPiece:
    """WordPiece (BERT): a token begins a word unless it has the prefix; so punctuation has a space
    before it."""

    drop_first_space = True

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def token_bytes(self, token: str) -> bytes:
        if token.startswith(self._prefix):
            return token.removeprefix(self._prefix).encode()
        return f" {token}".encode()


def _decoder_kind(
    decoder: dict[str, Any] | None,
) -> _ByteLevel | _SentencePiece | _WordPiece | _Suffixed:
    """Which of the known ways turns tokens into text; another one is refused by name."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if "Metaspace" in kinds:
        scheme = next(s.get("prepend_scheme", "always") for s in steps if s["type"] == "Metaspace")
        return _SentencePiece(
            drop_first_space=scheme != "never", byte_fallback="ByteFallback" in kinds
        )
    if kinds & {"Replace", "ByteFallback"}:
        strips = any(s["type"] == "Strip" and s.get("start", 0) > 0 for s in steps)
        return _SentencePiece(drop_first_space=strips, byte_fallback="ByteFallback" in kinds)
    if "WordPiece" in kinds:
        return _WordPiece(next(s.get("prefix", "##") for s in steps if s["type"] == "WordPiece"))
    if "BPEDecoder" in kinds:
        return _Suffixed(next(s.get("suffix", "</w>") for s in steps if s["type"] == "BPEDecoder"))
    if kinds - {"Fuse"}:
        raise CheckpointError(
            f"tokenizer.json: decoder {', '.join(sorted(kinds))} is not supported "
            "(known: ByteLevel, Metaspace, Replace, ByteFallback, WordPiece, BPEDecoder)"
        )
    return _Suffixed("")
