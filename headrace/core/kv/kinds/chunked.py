"""Attention in chunks (Llama 4's local layers): a query at position p reads positions
floor(p / C) * C .. p. When a chunk of C tokens is full, all its blocks are given back at once.

A prefix hit of h blocks needs the blocks of the chunk that position h * block_tokens lies in, and
none if a chunk ends there.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.wire.step import KVGroup
from headrace.core.kv.kinds.kind import span_of


class ChunkedKind:
    """The rules of a group whose layers attend within chunks of `chunk` tokens."""

    trims = True
    shares = True

    def __init__(self, chunk: int, block_tokens: int, *, spare_blocks: int) -> None:
        assert chunk >= 1, chunk
        self.chunk = chunk
        self._block_tokens = block_tokens
        self._spare = spare_blocks

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> ChunkedKind:
        """The rules of this group."""
        return ChunkedKind(span_of(group), block_tokens, spare_blocks=spare_blocks)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return -(-tokens // self._block_tokens)

    def first_kept(self, position: int) -> int:
        """The first block still needed when the next token to compute is at `position`.

        With prefix caching those of the chunk before are kept for a block's length: the same prompt
        sent again matches only up to its last token but one.
        """
        return self._chunk_start(max(0, position - self._spare * self._block_tokens))

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end whose chunk is cached up to h. A miss at block j moves the end to j:
        every hit further right in that chunk needs j."""
        while end > 0:
            left = self.hit_start(end)
            miss = next((i for i in range(left, end) if not is_cached(i)), None)
            if miss is None:
                return end
            end = miss
        return 0

    def hit_start(self, hit: int) -> int:
        """See CacheKind."""
        return self._chunk_start(hit * self._block_tokens)

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        size = self._block_tokens
        most = -(-self.chunk // size) + 1 + 2 * self._spare + -(-chunk_tokens // size)
        return min(self.num_blocks(tokens) - self.num_blocks(done), most)

    def _chunk_start(self, position: int) -> int:
        return position // self.chunk * self.chunk // self._block_tokens
