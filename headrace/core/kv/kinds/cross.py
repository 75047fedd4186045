"""Cross attention: the keys and values of an encoder's output, written once when a request starts
and read until it ends. Their number does not depend on the answer's length.

They are computed from the encoder's input, not from the prompt's tokens, so that they are not
shared between requests; a prefix hit of the decoder's own caches leaves them to be written anew.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.wire.step import KVGroup
from headrace.core.kv.kinds.kind import span_of


class CrossKind:
    """The rules of a group whose layers attend to `tokens` outputs of an encoder."""

    trims = False
    shares = False

    def __init__(self, tokens: int, block_tokens: int) -> None:
        self._blocks = -(-tokens // block_tokens)

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> CrossKind:
        """The rules of this group."""
        return CrossKind(span_of(group), block_tokens)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return self._blocks if tokens else 0

    def first_kept(self, position: int) -> int:
        """See CacheKind."""
        return 0

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """Any: nothing of a hit is needed here."""
        return end

    def hit_start(self, hit: int) -> int:
        """None of its blocks comes from a hit."""
        return hit

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        return self.num_blocks(tokens)
