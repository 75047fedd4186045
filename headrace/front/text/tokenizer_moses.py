"""FSMT's vocabularies: vocab-src.json of the language that is read, vocab-tgt.json of the one that
is written, and merges.txt of both (Sennrich et al. 2016, section 3.2) behind Moses' words, for
which the optional library `sacremoses` is asked.

Answers are pieces with spaces where words end, as Moses leaves words: a full stop stands apart.
As transformers 5.23 has it (tokenization_fsmt.py), but for Moses' way back.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.base.config.hf import read_json
from headrace.base.errors import CheckpointError
from headrace.base.optional import require
from headrace.front.text.threads import refusing_failures
from headrace.front.text.tokenizer import Guard, Tokenizer, TokenizerFacts, neutral
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_sentencepiece import encode_between

SOURCE, TARGET, MERGES = "vocab-src.json", "vocab-tgt.json", "merges.txt"
END_OF_WORD = "</w>"
UNKNOWN, LAST = "<unk>", "</s>"
SPECIAL = ("<s>", "<pad>", LAST, UNKNOWN)
_PLAIN = str.maketrans(
    {
        **dict(zip("０１２３４５６７８９，、：∶？", "0123456789,,::?", strict=True)),
        **dict(zip("！；％～", "!;%~", strict=True)),
        **dict.fromkeys("”“《》」「", '"'),
        **{"）": ")", "（": "(", "’": "'", "…": "...", "━": "-", "〈": "<", "〉": ">"},
        **{"【": "[", "】": "]"},
    }
)
"""Punctuation and digits of Chinese and Japanese print, as Moses writes them in ASCII."""
_STOPS = re.compile(r"[。．]\s*")

SplitWords = Callable[[str], list[str]]


class MosesTokenizer(Tokenizer):
    """Two vocabularies; `words`: splits a text. Ids are those of the source where text becomes ids,
    and of the target where ids become text."""

    def __init__(
        self,
        source: Mapping[str, int],
        target: Mapping[str, int],
        merges: list[tuple[str, str]],
        *,
        words: SplitWords,
        facts: TokenizerFacts,
    ) -> None:
        super().__init__(facts)
        lacking = [token for token in SPECIAL if source.get(token) != target.get(token)]
        if lacking or UNKNOWN not in source or LAST not in source:
            named = (lacking or [UNKNOWN])[0]
            raise CheckpointError(f"{SOURCE}, {TARGET}: {named} must have one id in both")
        self._source, self._words = source, words
        self._target = {token_id: token for token, token_id in target.items()}
        self._ids = dict(target)
        self._rank = {pair: i for i, pair in enumerate(merges)}
        self._special = [source[token] for token in SPECIAL if token in source]
        self.special_ids = frozenset(self._special)
        self.num_ids = max(self._target) + 1
        self.longest_token = max(map(len, source))
        self._of_word = lru_cache(maxsize=1 << 16)(self._pieces_of)

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def vocabulary_token(self, token_id: int) -> str:
        return self._target.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        token = self._target.get(token_id, "")
        if token_id in self.special_ids:
            return token.encode()
        return html.unescape(token.replace(END_OF_WORD, " ")).encode()

    def _encode(self, text: str) -> list[int]:
        return [*self._encode_bare(text), self._source[LAST]]

    def _encode_bare(self, text: str) -> list[int]:
        return self.encode_guarded(neutral(text))

    def encode_plain(self, text: str) -> list[int]:
        with refusing_failures(text):
            words = self._words(text)
        return [token_id for word in words if word for token_id in self._of_word(word)]

    def encode_guarded(self, text: str) -> list[int]:
        return encode_between(self.guard.resolve(text), self._special, self.encode_plain)

    @cached_property
    def guard(self) -> Guard:
        return Guard(token for token in SPECIAL if token in self._source)

    def _pieces_of(self, word: str) -> tuple[int, ...]:
        """The ids of a word, the earliest merge first and everywhere at once."""
        pieces = [*word[:-1], word[-1] + END_OF_WORD]
        while len(pieces) > 1:
            pairs = list(pairwise(pieces))
            best = min(pairs, key=lambda pair: self._rank.get(pair, len(self._rank)))
            if best not in self._rank:
                break
            pieces = _merged(pieces, best)
        unknown = self._source[UNKNOWN]
        return tuple(self._source.get(piece, unknown) for piece in pieces)


def _merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def load_moses(path: str) -> MosesTokenizer:
    """The tokenizer of the folder with this vocab-src.json."""
    folder = Path(path).parent
    source, target = (_vocabulary(folder / name) for name in (SOURCE, TARGET))
    lines = (folder / MERGES).read_text(encoding="utf-8").split("\n")
    merges = [(one[0], one[1]) for one in (line.split() for line in lines) if len(one) > 1]
    config = {**_json(folder / "config.json"), **_json(folder / "tokenizer_config.json")}
    languages = config.get("langs")
    if not isinstance(languages, list) or len(languages) != 2:
        raise CheckpointError(f"{folder}: tokenizer_config.json: langs must name two languages")
    words = _moses_words(str(languages[0]), lower=bool(config.get("do_lower_case", False)))
    return MosesTokenizer(source, target, merges, words=words, facts=read_facts(folder))


def _moses_words(language: str, *, lower: bool) -> SplitWords:
    """Moses' words of a language: punctuation in ASCII and normed, nothing that is not printed."""
    library = require("sacremoses", extra="moses", purpose="an FSMT tokenizer")
    norm, split = library.MosesPunctNormalizer(lang=language), library.MosesTokenizer(lang=language)

    def words(text: str) -> list[str]:
        text = _STOPS.sub(". ", text.lower() if lower else text).translate(_PLAIN)
        shown = "".join(c for c in norm.normalize(text) if unicodedata.category(c)[0] != "C")
        return list(split.tokenize(shown, aggressive_dash_splits=True, escape=True))

    return words


def _vocabulary(file: Path) -> dict[str, int]:
    if not file.is_file():
        raise CheckpointError(f"tokenizer: {file.parent} has no {file.name}")
    read = read_json(file)
    if not read or not all(isinstance(one, int) and one >= 0 for one in read.values()):
        raise CheckpointError(f"{file}: a vocabulary of ids is needed")
    return read


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
