"""The backend over xgrammar: pushdown automata whose masks are mostly known when the grammar is
compiled.

Slower to compile (seconds for a schema over a large vocabulary), with less of JSON schema, and it
brings torch into the core process; so it is an extra, and llguidance the default. Special tokens
have no text here: a literal that spells one may be written as the token or letter by letter, a
Token only as the token.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import InvalidRequest
from headrace.base.optional import require
from headrace.base.wire.grammar import Node, Vocabulary
from headrace.core.grammar.backends.tags import TagWriter, has_tokens
from headrace.core.ports import MAX_FORCED, Encode, Matcher

MAX_FORCED_CHARS = 8192
MAX_MESSAGE_CHARS = 300
CACHE_BYTES = 64 << 20
"""What the library may keep of parts that grammars share."""
_UNWRITABLE = b"\xff"
"""No text holds this byte, so that no text can be written by a special token; one without any is
never allowed."""
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
"""How the encoding of a surrogate begins. No text has one, but the library takes it for a character
(xgrammar 0.2): the answer would hold three replacement characters, more than `maxLength` allows."""
_PLACE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+?:\d+: ")  # time and line of the library's source


class XgrammarMatcher:
    """One answer's place."""

    def __init__(
        self,
        matcher: Any,
        backend: XgrammarBackend,
        *,
        opened: bool = False,
        jumps_forward: bool = True,
    ) -> None:
        self.matcher = matcher
        self.opened = opened
        """Whether the last byte could begin a surrogate."""
        self._jumps_forward = jumps_forward
        self._backend = backend

    def accept(self, token: int) -> bool:
        """See Matcher."""
        piece = self._backend.piece(token)
        if self.matcher.is_terminated() or (self.opened and _SURROGATE.match(b"\xed" + piece)):
            return False
        accepted = bool(self.matcher.accept_token(token))
        if accepted:
            self.opened = piece.endswith(b"\xed")
        return accepted

    @property
    def complete(self) -> bool:
        """See Matcher. Where the grammar may end, only the mask says whether it also may go on."""
        if self.matcher.is_terminated():
            return True
        return self.matcher.is_completed() and self._backend.ends(self.matcher)

    def forced(self) -> list[int]:
        """See Matcher. The library finds a forced text whole, however long (0.5 us a character):
        one that is very long is taken once and not looked for again."""
        if not self._jumps_forward:
            return []
        try:
            text = self.matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # within a character
            return []
        self._jumps_forward = len(text) <= MAX_FORCED_CHARS
        return self._backend.tokens_of(text[:MAX_FORCED_CHARS])[:MAX_FORCED]

    def copy(self) -> XgrammarMatcher:
        """See Matcher."""
        return XgrammarMatcher(
            self.matcher.fork(),
            self._backend,
            opened=self.opened,
            jumps_forward=self._jumps_forward,
        )


class XgrammarBackend:
    """Implements ports.GrammarBackend."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None = None) -> None:
        library = require("xgrammar", extra="xgrammar", purpose="--grammar-backend xgrammar")
        special = set(vocabulary.special_ids)
        pieces = [b"" if i in special else p for i, p in enumerate(vocabulary.pieces)]
        info = library.TokenizerInfo(
            [
                _UNWRITABLE + p if i in special or _SURROGATE.search(p) else p
                for i, p in enumerate(vocabulary.pieces)
            ],
            library.VocabType.RAW,
            vocab_size=vocabulary.width,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        self._library = library
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        self._apart = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._filler = library.BatchGrammarMatcher(min(8, len(os.sched_getaffinity(0))))
        self._tags = TagWriter(library, vocabulary)
        self._encode = encode
        self._pieces = pieces
        self._texts = sorted(filter(None, pieces))
        self._ordinary = _mask(vocabulary.width, [i for i, piece in enumerate(pieces) if piece])
        ends = [i for i, piece in enumerate(pieces) if _SURROGATE.match(b"\xed" + piece)]
        self._no_surrogates = ~_mask(vocabulary.width, ends)
        self._scratch = np.zeros((1, len(self._ordinary)), np.int32)

    def piece(self, token: int) -> bytes:
        """What a token writes."""
        return self._pieces[token] if token < len(self._pieces) else b""

    def compile(self, node: Node) -> XgrammarMatcher:
        """See GrammarBackend."""
        try:
            form = self._tags.write(node)
            # parts that differ only in their tokens are one to the library's cache (xgrammar 0.2)
            compiler = self._apart if has_tokens(form) else self._compiler
            compiled = compiler.compile_structural_tag({"type": "structural_tag", "format": form})
            return XgrammarMatcher(self._library.GrammarMatcher(compiled), self)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(_cleaned(str(error))) from None

    def fill(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
        """See GrammarBackend."""
        own = [_own(matcher) for matcher in matchers]
        masks[:] = -1  # a mask that allows everything may be left as it is
        try:
            self._filler.batch_fill_next_token_bitmask([one.matcher for one in own], masks)
        except RuntimeError as error:
            return [_cleaned(str(error))] * len(own)
        for mask, one in zip(masks, own, strict=True):
            if one.opened:
                mask &= self._no_surrogates
        return [None] * len(own)

    def ends(self, matcher: Any) -> bool:
        """Whether a matcher allows nothing but the end."""
        self._scratch[:] = -1
        matcher.fill_next_token_bitmask(self._scratch)
        return not (self._scratch[0] & self._ordinary).any()

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a forced text, as far as what follows it cannot make others of them."""
        if not text or self._encode is None:
            return []
        ids, data = self._encode(text), text.encode()
        pieces = [self.piece(i) for i in ids]
        if b"".join(pieces) != data:
            return []
        at = 0
        for count, piece in enumerate(pieces):
            if self._begins_longer(data[at:]):
                return ids[:count]
            at += len(piece)
        return ids

    def _begins_longer(self, text: bytes) -> bool:
        """Whether a token begins with this text and goes on."""
        after = bisect_right(self._texts, text)
        return after < len(self._texts) and self._texts[after].startswith(text)


def _own(matcher: Matcher) -> XgrammarMatcher:
    assert isinstance(matcher, XgrammarMatcher)
    return matcher


def _mask(width: int, ids: list[int]) -> npt.NDArray[np.int32]:
    """A bit for each of the ids, as masks have them."""
    bits = np.zeros(-(-width // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _cleaned(message: str) -> str:
    """The reason on one line."""
    text = " ".join(_PLACE.sub("", message).split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
