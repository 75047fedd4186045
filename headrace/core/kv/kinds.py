"""The kinds of caches: what a request's growth takes, what may be given back and what a prefix hit
needs, one class per kind behind one protocol; and what holds over all groups of a model together.

A kind works in blocks of its own group and knows neither pools nor requests; the manager adds its
answers up over the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup


class CacheKind(Protocol):
    """The rules of one group of caches.

    trims     blocks may be given back while the request runs
    shares    its blocks can be found again by other requests
    """

    trims: bool
    shares: bool

    def num_blocks(self, tokens: int) -> int:
        """Entries of the block table of a sequence that holds so many tokens."""
        ...

    def first_kept(self, position: int) -> int:
        """The first block still needed when the next token to compute is at `position`."""
        ...

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end such that a request can begin behind its first h blocks."""
        ...

    def hit_start(self, hit: int) -> int:
        """The first block that a hit of `hit` blocks makes use of; the last is hit - 1."""
        ...

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """The most blocks held at one time beyond those of a hit of `done` tokens, while the rest
        of `tokens` is computed in chunks."""
        ...


def span_of(group: KVGroup) -> int:
    """The group's span in tokens, which its kind needs."""
    if group.span is None or group.span < 1:
        raise ConfigError(
            f"KV group of kind {group.kind!r} has span {group.span}; it needs one of at least 1 token"
        )
    return group.span


class FullKind:
    """Full attention: every block of the sequence is needed until the request ends.

    Latent caches (multi-head latent attention) and the keys of sparse indexers live exactly as
    long, so that they are of this kind too; only their bytes differ, which the core does not see.
    """

    trims = False
    shares = True

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> FullKind:
        """The rules of this group."""
        return FullKind(block_tokens)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return -(-tokens // self._block_tokens)

    def first_kept(self, position: int) -> int:
        """See CacheKind."""
        return 0

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """The largest h <= end such that blocks 0 .. h-1 are all cached."""
        for index in range(end):
            if not is_cached(index):
                return index
        return end

    def hit_start(self, hit: int) -> int:
        """See CacheKind."""
        return 0

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        return self.num_blocks(tokens) - self.num_blocks(done)


class BlockwiseKind(FullKind):
    """Full attention of models that write whole blocks of text, which KV blocks are made of: the KV
    block of the token that comes next is held too, for all of its text is written at once."""

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> BlockwiseKind:
        """The rules of this group."""
        return BlockwiseKind(block_tokens)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return tokens // self._block_tokens + 1

    def most_held(self, tokens: int, *, done: int, chunk_tokens: int) -> int:
        """See CacheKind."""
        return self.num_blocks(tokens) - done // self._block_tokens


class PatchKind(FullKind):
    """Full attention among patches of a text's bytes (BLT): the n-th patch lies where the n-th byte
    does, long after the block of that byte is full. So no other request can begin behind it.
    """

    shares = False

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> PatchKind:
        """The rules of this group."""
        return PatchKind(block_tokens)

    def longest_hit(self, is_cached: Callable[[int], bool], end: int) -> int:
        """None: a text is always read from its first byte."""
        return 0


class WindowKind:
    """Sliding-window attention: a query at position p reads positions p-W+1 .. p, so that older
    blocks are given back.

    A prefix hit of h blocks needs only the last K = ceil((W-1) / block_tokens) of them, and the
    right-most such run is searched with jumps: the window is probed from its left end, and a miss
    at block j moves the window's end to j, because every window that ends further right contains j.
    No block is probed twice.
    """

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


class ChunkedKind:
    """Attention in chunks (Llama 4's local layers): a query at position p reads positions
    floor(p / C) * C .. p. When a chunk of C tokens is full, all its blocks are given back at once.

    A prefix hit of h blocks needs the blocks of the chunk that position h * block_tokens lies in,
    and none if a chunk ends there.
    """

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


class CrossKind:
    """Cross attention: the keys and values of an encoder's outputs, written once when a request
    starts and read until it ends. Their number does not depend on the answer's length: `tokens` is
    everywhere that of the encoder's outputs, `span` at most.

    They are computed from the encoder's input, not from the prompt's tokens, so that they are not
    shared between requests; a prefix hit of the decoder's own caches leaves them to be written
    anew.
    """

    trims = False
    shares = False

    def __init__(self, span: int, block_tokens: int) -> None:
        self.span = span
        self._block_tokens = block_tokens

    @staticmethod
    def of(group: KVGroup, *, block_tokens: int, spare_blocks: int) -> CrossKind:
        """The rules of this group."""
        return CrossKind(span_of(group), block_tokens)

    def num_blocks(self, tokens: int) -> int:
        """See CacheKind."""
        return -(-tokens // self._block_tokens)

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


class StateKind:
    """Recurrent state: one slot per row, which the workers own by the row's number, so that running
    takes nothing from the pool. Block i stands for the state behind block i's last token.

    A prefix can be continued only from a copy of the state at exactly its end. Copies (snapshots)
    are made where a prompt's chunk ends at a block boundary; they have a small pool of their own,
    and its least recently used one makes room. Nobody waits for a snapshot: without one there is no
    hit.
    """

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


BLOCKWISE = "blockwise"
KINDS: dict[str, Callable[..., CacheKind]] = {
    "full": FullKind.of,
    BLOCKWISE: BlockwiseKind.of,
    "latent": FullKind.of,
    "patches": PatchKind.of,
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
