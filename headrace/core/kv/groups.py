"""From the workers' KV groups to their rules, and what holds over all groups together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup
from headrace.core.kv.kinds.chunked import ChunkedKind
from headrace.core.kv.kinds.cross import CrossKind
from headrace.core.kv.kinds.full import FullKind
from headrace.core.kv.kinds.kind import CacheKind
from headrace.core.kv.kinds.state import StateKind
from headrace.core.kv.kinds.window import WindowKind

KINDS: dict[str, Callable[..., CacheKind]] = {
    "full": FullKind.of,
    "latent": FullKind.of,
    "window": WindowKind.of,
    "chunked": ChunkedKind.of,
    "cross": CrossKind.of,
    "state": StateKind.of,
}
"""`KVGroup.kind` -> its rules."""


def kind_of(group: KVGroup, *, block_tokens: int, prefix_caching: bool) -> CacheKind:
    """The rules of one group, whose blocks hold so many tokens. With prefix caching kinds that trim
    keep a spare block."""
    if group.kind not in KINDS:
        raise ConfigError(f"KV group of kind {group.kind!r} (known: {', '.join(KINDS)})")
    return KINDS[group.kind](group, block_tokens=block_tokens, spare_blocks=int(prefix_caching))


def common_hit(
    kinds: Sequence[CacheKind],
    ratios: Sequence[int],
    is_cached: Callable[[int, int], bool],
    end: int,
) -> int:
    """The largest h <= end that is a prefix hit in every group, in blocks of the hash chain.

    A block of group g is `ratios[g]` of these; `is_cached(g, index)` asks for a block of the group.
    Each group lowers the bound to the largest hit it allows; a group that was content with a higher
    bound is asked again, until all agree. No common hit is skipped, because each answer is the
    largest one below the bound.
    """
    agreed = 0
    group = 0
    while end > 0 and agreed < len(kinds):
        ratio = ratios[group]
        hit = ratio * kinds[group].longest_hit(partial(is_cached, group), end // ratio)
        agreed = agreed + 1 if hit == end else 1
        end = hit
        group = (group + 1) % len(kinds)
    return end


def capacity_tokens(fits: Callable[[int], bool], *, step: int, bound: int) -> int:
    """The longest sequence that fits alone, in multiples of `step` tokens up to `bound`."""
    low, high = 0, -(-bound // step)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle - 1
    return min(low * step, bound)
