"""Full attention: every block of the sequence is needed until the request ends."""

from __future__ import annotations

from collections.abc import Callable


class FullKind:
    """The rules of a group whose layers attend to the whole sequence."""

    is_window = False

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end such that blocks 0 .. h-1 are all cached."""
        for index in range(end):
            if not is_cached(index):
                return index
        return end

    def hit_start(self, hit: int) -> int:
        """The first block that a hit of `hit` blocks makes use of."""
        return 0

    def first_kept(self, position: int) -> int:
        """The first block still needed when the next token to compute is at `position`."""
        return 0

    def most_held(self, blocks: int, chunk_blocks: int) -> int:
        """The most blocks held at one time by a sequence of `blocks` that is computed in chunks."""
        return blocks
