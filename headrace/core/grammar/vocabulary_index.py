"""The vocabulary as texts: which tokens begin, continue or cross a tag. Built once, asked a few
times per answer.

Special tokens stand under their names here, because tags such as `<think>` are special tokens in
some vocabularies.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headrace.base.wire.grammar import Vocabulary

_BREAKS = b"\r\n"
CACHE_BYTES = 8 << 20  # what the masks of each kind may hold
Int32 = npt.NDArray[np.int32]


class VocabularyIndex:
    """Look-ups in one vocabulary. `breaks`: the tokens that are line breaks alone."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.pieces = vocabulary.pieces
        self._special_ids = frozenset(vocabulary.special_ids)
        self.words = -(-vocabulary.width // 32)
        self._sorted = sorted((piece, i) for i, piece in enumerate(vocabulary.pieces) if piece)
        self._texts = [piece for piece, _ in self._sorted]
        self.breaks = frozenset(i for piece, i in self._sorted if not piece.strip(_BREAKS))
        self.break_ids = self.mask_of(sorted(self.breaks))
        self.eos_mask = self.mask_of(list(vocabulary.eos_ids))
        self.full_mask = self.mask_of(list(range(len(vocabulary.pieces))))
        kept = max(16, CACHE_BYTES // (4 * self.words))
        self.crossing = lru_cache(maxsize=kept)(self._crossing)
        self.leading_to = lru_cache(maxsize=kept)(self._leading_to)
        self.forcing = lru_cache(maxsize=kept)(self._forcing)

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as the engine
    def token_of(self, text: bytes) -> int | None:
        """The token that is this text, the special one if several are; None: it takes several."""
        same = [i for piece, i in self._from(text) if piece == text]
        special = [i for i in same if i in self._special_ids]
        return next(iter(special + same), None)

    def mask_of(self, ids: list[int]) -> Int32:
        """A mask of these ids, int32 [words]."""
        bits = np.zeros(self.words * 32, np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _crossing(self, tail: bytes, tag: bytes) -> Int32 | None:
        """After `tail`, a mask without the tokens that end `tag` and go on with other text than
        line breaks; None: all tokens are allowed."""
        wrong: list[int] = []
        for place in overlaps(tail, tag):
            wrong += [i for piece, i in self._from(tag[place:]) if _goes_on(piece, tag[place:])]
        wrong += [i for piece, i in self._holding(tag) if _goes_on(piece, tag)]
        return self.full_mask & ~self.mask_of(wrong) if wrong else None

    def _leading_to(self, text: bytes) -> Int32:
        """A mask of the tokens that begin `text`, or begin with it."""
        return self.mask_of(self._within(text) + [i for _, i in self._from(text)])

    def _forcing(self, text: bytes) -> Int32:
        """A mask of the tokens that begin `text` and do not go beyond it."""
        return self.mask_of(self._within(text))

    def _from(self, text: bytes) -> list[tuple[bytes, int]]:
        """The tokens that begin with `text`."""
        at = bisect_left(self._texts, text)
        tokens = []
        while at < len(self._texts) and self._texts[at].startswith(text):
            tokens.append(self._sorted[at])
            at += 1
        return tokens

    def _within(self, text: bytes) -> list[int]:
        """The tokens that `text` begins with."""
        tokens = []
        for end in range(1, len(text) + 1):
            at = bisect_left(self._texts, text[:end])
            while at < len(self._texts) and self._texts[at] == text[:end]:
                tokens.append(self._sorted[at][1])
                at += 1
        return tokens

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as the engine
    def _holding(self, tag: bytes) -> list[tuple[bytes, int]]:
        """The tokens in which `tag` stands behind other text."""
        return [(piece[piece.find(tag) :], i) for piece, i in self._sorted if piece.find(tag) > 0]


def overlaps(tail: bytes, tag: bytes) -> list[int]:
    """The numbers of bytes of `tag` that `tail` may end with, the greatest first; 0 always."""
    return [n for n in range(min(len(tail), len(tag) - 1), -1, -1) if tail.endswith(tag[:n])]


def _goes_on(piece: bytes, tag: bytes) -> bool:
    return bool(piece[piece.find(tag) + len(tag) :].strip(_BREAKS))
