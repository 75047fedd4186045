"""Recurrent state: one slot per row, which the workers own by the row's number, so that running
takes nothing from the pool.

A prefix can be continued only from a copy of the state at exactly its end. Copies (snapshots) are
made where a prompt's chunk ends at a block boundary; they have a small pool of their own, and its
least recently used one makes room. Nobody waits for a snapshot: without one there is no hit.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.wire.step import KVGroup


class StateKind:
    """The rules of a group of recurrent layers. Block i stands for the state behind block i's last
    token."""

    trims = False
    shares = True

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> StateKind:
        """The rules of this group."""
        return StateKind()

    def num_blocks(self, tokens: int) -> int:
        """None: the state lies in the row."""
        return 0

    def first_kept(self, position: int) -> int:
        """See CacheKind."""
        return 0

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end with a snapshot behind block h-1."""
        return next((hit for hit in range(end, 0, -1) if is_cached(hit - 1)), 0)

    def hit_start(self, hit: int) -> int:
        """The one snapshot at the hit's end."""
        return max(0, hit - 1)

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        return 0
