"""From the workers' KV groups to their rules, and what holds over all groups together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup
from headrace.core.kv.kinds.full import FullKind
from headrace.core.kv.kinds.window import WindowKind

Kind = FullKind | WindowKind


def kind_of(group: KVGroup, *, block_tokens: int, prefix_caching: bool) -> Kind:
    """The rules of one group."""
    if group.kind == "full":
        return FullKind()
    if group.kind == "window" and group.window is not None:
        return WindowKind(group.window, block_tokens, spare_blocks=int(prefix_caching))
    raise ConfigError(f"KV group of kind {group.kind!r} (known: full, window with its size)")


def common_hit(kinds: Sequence[Kind], is_cached: Callable[[int, int], bool], end: int) -> int:
    """The largest h <= end that is a prefix hit in every group; `is_cached(group, block index)`.

    Each group lowers the bound to the largest hit it allows; a group that was content with a higher bound is asked
    again, until all agree. No common hit is skipped, because each answer is the largest one below the bound.
    """
    agreed = 0
    group = 0
    while end > 0 and agreed < len(kinds):
        hit = kinds[group].longest_hit(partial(is_cached, group), end)
        agreed = agreed + 1 if hit == end else 1
        end = hit
        group = (group + 1) % len(kinds)
    return end


def least_blocks(kinds: Sequence[Kind], blocks: int) -> int:
    """The fewest pool blocks with which a sequence of `blocks` blocks can be computed, a block at a time."""
    return sum(kind.most_held(blocks, 1) for kind in kinds)


def capacity_blocks(kinds: Sequence[Kind], usable: int, *, bound: int) -> int:
    """The longest sequence, in blocks, that fits `usable` pool blocks alone; at most `bound`."""
    low, high = 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        if least_blocks(kinds, middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return low
