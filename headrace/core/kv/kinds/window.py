"""Sliding-window attention: a query at position p reads positions p-W+1 .. p, so that older blocks
are given back.

A prefix hit of h blocks needs only the last K = ceil((W-1) / block_tokens) of them, and the
right-most such run is searched with jumps: the window is probed from its left end, and a miss at
block j moves the window's end to j, because every window that ends further right contains j. No
block is probed twice.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.wire.step import KVGroup
from headrace.core.kv.kinds.kind import span_of


class WindowKind:
    """The rules of a group whose layers attend to the last `window` tokens."""

    trims = True
    shares = True

    def __init__(self, window: int, block_tokens: int, *, spare_blocks: int) -> None:
        assert window >= 1, window
        self.window = window
        self._block_tokens = block_tokens
        self._spare = spare_blocks
        self.hit_blocks = -(-(window - 1) // block_tokens)

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> WindowKind:
        """The rules of this group."""
        return WindowKind(span_of(group), block_tokens, spare_blocks=spare_blocks)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return -(-tokens // self._block_tokens)

    def first_kept(self, position: int) -> int:
        """The first block still needed when the next token to compute is at `position`.

        With prefix caching one block more is kept: the same prompt sent again matches only up to
        its last token but one, so that its window begins up to a block earlier.
        """
        return max(0, max(0, position - self.window + 1) // self._block_tokens - self._spare)

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end such that the last min(h, K) blocks before h are all cached."""
        known = end  # blocks known .. end-1 are cached
        while end > 0:
            left = max(0, end - self.hit_blocks)
            miss = next((i for i in range(left, min(known, end)) if not is_cached(i)), None)
            if miss is None:
                return end
            end, known = miss, left
        return 0

    def hit_start(self, hit: int) -> int:
        """See CacheKind."""
        return max(0, hit - self.hit_blocks)

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        size = self._block_tokens
        behind = (self.window - 1 + size - 2) // size + 1  # blocks that W-1 tokens can touch
        most = behind + self._spare + -(-chunk_tokens // size)
        return min(self.num_blocks(tokens) - self.num_blocks(done), most)
