"""KV blocks of requests: finding cached ones, taking, giving back, and naming what has been
computed.

All groups of blocks draw from one pool; what a request's growth takes, each group's kind says
(kinds.py). A request's list of blocks holds 0 (the null block) where its group has given a block
back. Recurrent groups take no blocks: snapshots of their state are numbered from pools of their
own. Decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.base.config.kv_options import CacheChoices
from headrace.base.errors import ContextTooLong
from headrace.base.wire.step import WorkerFacts
from headrace.core.capture_checks import steered_keys
from headrace.core.kv.block_ages import watch
from headrace.core.kv.cross import CrossOutputs
from headrace.core.kv.eviction import pool_of
from headrace.core.kv.hashing import HASHERS
from headrace.core.kv.kinds import CacheKind, CrossKind, capacity_tokens, common_hit, kind_of
from headrace.core.kv.pool import NULL_BLOCK, Snapshots
from headrace.core.media_checks import media_mark
from headrace.core.request import Request

Int32 = npt.NDArray[np.int32]
Intp = npt.NDArray[np.intp]
BlockUpdate = tuple[int, int, int]
"""Group, block index, block id."""
BlockColumns = tuple[int, Intp, Int32, Int32]
"""Group; rows [N], and for each the block index and the block id."""


@dataclass(frozen=True)
class Need:
    """Whether a waiting request's tokens fit beside the growth of running ones, and the units of
    the pool that they and that growth take."""

    fits: bool
    units: int
    headroom: int


class KVManager:
    """The KV cache as the scheduler sees it. `chunk_tokens` is the most one request computes in a
    step. A model without KV groups (an encoder) takes no blocks: everything fits, nothing is found
    again. `tokens_ahead`: by so many tokens a row takes its next block early."""

    def __init__(
        self,
        facts: WorkerFacts,
        *,
        prefix_caching: bool,
        chunk_tokens: int,
        hash_key: bytes | None = None,
        choices: CacheChoices = CacheChoices(),
    ) -> None:
        self.groups = groups = facts.groups
        self.block_tokens, self.tokens_ahead = facts.block_tokens, int(facts.block_length > 0)
        self.prefix_caching = prefix_caching and bool(groups)
        size = facts.block_tokens
        self.kinds = tuple(
            kind_of(g, block_tokens=size * g.block_ratio, prefix_caching=prefix_caching)
            for g in groups
        )
        self.ratios = tuple(group.block_ratio for group in groups)
        trims = [kind.trims for kind in self.kinds]
        self.pool = pool_of(facts, trims, choices)
        self.ages = watch(self.pool, choices.watched_blocks)
        self.snapshots = Snapshots(groups, size, every=choices.state_interval)
        self._trimmed = [g for g, kind in enumerate(self.kinds) if kind.trims]
        self.trims = bool(self._trimmed or self.snapshots)
        self._shared = [
            g for g, kind in enumerate(self.kinds) if kind.shares and g not in self.snapshots
        ]
        self.spans = {g: k.span for g, k in enumerate(self.kinds) if isinstance(k, CrossKind)}
        # Groups of which a sequence takes one block with each block of the hash chain.
        self._even = [g for g in self._shared if self.ratios[g] == 1]
        self._uneven = [g for g in self._shared if self.ratios[g] > 1]
        self._cross = CrossOutputs(facts)
        self.hasher = HASHERS[choices.hashing](hash_key)
        self._chunk_tokens = chunk_tokens
        self.capacity_tokens = capacity_tokens(
            lambda tokens: self.least_needed(tokens) <= self.pool.num_usable,
            step=facts.block_tokens,
            bound=facts.max_model_len,
        )
        self.num_queries = 0
        self.num_hits = 0

    def least_needed(self, tokens: int) -> int:
        """The fewest units of the pool with which a request of so many tokens can run, computed a
        block at a time, whatever its encoder reads."""
        lengths = [self.spans.get(group, tokens) for group in range(len(self.kinds))]
        each, size = zip(self.kinds, lengths, strict=True), self.block_tokens
        return self.pool.units([k.most_held(n, done=0, chunk_tokens=size) for k, n in each])

    def cross_tokens(self, request: Request) -> int:
        """Outputs of an encoder in the request's caches; of no tokens, all there may be."""
        return self._cross.of(request.wire.encoder) or max(self.spans.values())

    def _each(self, request: Request, tokens: int) -> list[tuple[CacheKind, int]]:
        """Each group's kind, and the tokens in it of a request that has so many."""
        cross = self.cross_tokens(request) if self.spans else tokens
        return [(kind, cross if g in self.spans else tokens) for g, kind in enumerate(self.kinds)]

    def never_fits(self, tokens: int) -> ContextTooLong:
        """The error of a request whose tokens the pool can never hold."""
        return ContextTooLong(
            f"{tokens} tokens need {self.least_needed(tokens)} KV {self.pool.unit}, "
            f"{self.pool.num_usable} are available ({self.capacity_tokens} tokens at most)",
            field="prompt",
        )

    # a waiting request

    def match(self, request: Request) -> int:
        """How many blocks of the request's tokens are cached in all groups. One token is always
        left to compute."""
        if not self.prefix_caching:
            return 0
        if not request.chain_start:
            wire = request.wire
            steered = steered_keys(wire.sampling) if wire.sampling.control_vectors else ()
            keys = (*wire.extra_keys, *request.adapter.keys, *steered)
            request.chain_start = self.hasher.start(
                tenant=wire.tenant, salt=wire.cache_salt, extra_keys=keys
            )
        if request.needs_whole_prompt:
            return 0
        end = (request.num_tokens - 1) // self.block_tokens
        return common_hit(
            self.kinds, self.ratios, lambda g, i: self._find(request, g, i) is not None, end
        )

    def need(self, request: Request, hit: int, *, growing: int) -> Need:
        """What all of the request's tokens will take after a hit of `hit` blocks, while `growing`
        running requests take a block each in every group that grows."""
        done, chunk = hit * self.block_tokens, self._chunk_tokens
        each = self._each(request, request.num_tokens)
        counts = [kind.most_held(n, done=done, chunk_tokens=chunk) for kind, n in each]
        more = [0] * len(self.kinds)
        for group in self._shared:
            more[group] = growing
        hits = [(g, block) for g, _, block in self._hits(request, hit)]
        free_hits = sum(self.pool.refs(g, block) == 0 for g, block in hits)
        return Need(
            fits=self.pool.fits([a + b for a, b in zip(counts, more, strict=True)], hits),
            units=self.pool.units(counts) + free_hits,
            headroom=self.pool.units(more),
        )

    def can_begin(self, request: Request, hit: int) -> bool:
        """Whether the first token behind a hit of `hit` blocks fits."""
        tokens = hit * self.block_tokens + 1
        counts = [
            kind.num_blocks(length) - (hit // ratio if kind.shares else 0)
            for (kind, length), ratio in zip(self._each(request, tokens), self.ratios, strict=True)
        ]
        for group in self.snapshots:
            counts[group] = 0
        return self.pool.fits(counts, [(g, block) for g, _, block in self._hits(request, hit)])

    def attach(self, request: Request, hit: int) -> list[BlockUpdate]:
        """Gives the request its first `hit` blocks out of the cache."""
        updates = self._hits(request, hit)
        for group in self._shared:
            size = hit // self.ratios[group]
            request.trimmed[group] = self.kinds[group].hit_start(size)
            request.blocks[group] = [NULL_BLOCK] * size
        for group, index, block in updates:
            request.blocks[group][index] = block
            self.pool.hold(group, (block,))
        if self.snapshots and hit:
            updates += self.snapshots.attach(request, hit - 1, self.digest(request, hit - 1))
        request.registered = hit
        request.prefill_blocks = request.num_tokens // self.block_tokens
        request.registers = self.prefix_caching and not request.sees_all
        if self.prefix_caching and not request.needs_whole_prompt:
            self.num_queries += request.num_tokens
            self.num_hits += hit * self.block_tokens
        return updates

    # a running request

    def fit(self, request: Request, *, start: int, want: int, drafts: bool = False) -> int:
        """How many of `want` tokens from position `start` on the free blocks allow.

        Where the state of recurrent layers can be kept, a chunk that passes the end of a block ends
        with the last such block, so that there is something to keep. `drafts` may not stand."""
        if not self.kinds:
            return want
        if self.snapshots and request.registers and not drafts:
            want = self.snapshots.chunk_tokens(start=start, want=want)
        end, size = start + want, self.block_tokens
        if self.pool.fits(self._growth(request, end)):
            return want
        low, high = start // size, -(-end // size) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool.fits(self._growth(request, middle * size)):
                low = middle
            else:
                high = middle - 1
        return max(0, low * size - start)

    def held_tokens(self, request: Request) -> int:
        """The tokens for which the request has blocks in every group that grows."""
        sizes = (len(request.blocks[g]) * self.block_tokens * self.ratios[g] for g in self._shared)
        return min(sizes, default=1 << 31)

    def extend(self, request: Request, tokens: int, drafts: bool = False) -> list[BlockUpdate]:
        """Takes the blocks for positions below `tokens`; the caller has asked `fit`."""
        growth = self._growth(request, tokens)
        updates: list[BlockUpdate] = []
        if any(growth):
            for group, taken in enumerate(self.pool.take(growth)):
                blocks = request.blocks[group]
                first = len(blocks)
                blocks.extend(taken)
                updates.extend((group, first + i, block) for i, block in enumerate(taken))
        if self.snapshots and request.registers and not drafts:
            updates += self.snapshots.take(request, tokens)
        return updates

    def can_extend_each(self, requests: Sequence[Request], positions: Int32) -> bool:
        """Whether each of these decoding requests can go on at its position, which begins a
        block."""
        return self.pool.fits([len(chosen) for chosen in self._full(requests, positions)])

    def extend_each(
        self, rows: Intp, requests: Sequence[Request], positions: Int32
    ) -> list[BlockColumns]:
        """Takes the next block of each request, which owns this row, in every group in which its
        blocks are full; the caller has asked `can_extend_each`."""
        columns: list[BlockColumns] = []
        chosen = self._full(requests, positions)
        for group, taken in enumerate(self.pool.take([len(places) for places in chosen])):
            if not taken:
                continue
            lists = [requests[i].blocks[group] for i in chosen[group]]
            index = np.asarray([len(blocks) for blocks in lists], np.int32)
            for blocks, block in zip(lists, taken, strict=True):
                blocks.append(block)
            mine = rows if len(taken) == len(rows) else rows[chosen[group]]
            columns.append((group, mine, index, np.asarray(taken, np.int32)))
        return columns

    def _full(self, requests: Sequence[Request], positions: Int32) -> list[Sequence[int]]:
        """Of each group, the indices of the requests without a block for their position."""
        chosen: list[Sequence[int]] = [()] * len(self.kinds)
        for group in self._even:
            chosen[group] = range(len(requests))
        for group in self._uneven:
            num_blocks = self.kinds[group].num_blocks
            places = enumerate(zip(requests, positions.tolist(), strict=True))
            chosen[group] = [
                i for i, (at, p) in places if len(at.blocks[group]) < num_blocks(p + 1)
            ]
        return chosen

    def trim(self, request: Request, position: int) -> list[BlockUpdate]:
        """Gives back what no layer reads any more when the next token is at `position`.

        Blocks filled while decoding lose their hash: only a run that reaches a window's end can be
        hit. Those that were in the window at the end of a prefill chunk keep it: prompts are
        continued from there.
        """
        updates: list[BlockUpdate] = []
        for group in self._trimmed:
            blocks = request.blocks[group]
            first, kept = request.trimmed[group], self.kinds[group].first_kept(position)
            prefill_blocks = request.prefill_blocks // self.ratios[group]
            for index in range(first, min(kept, len(blocks))):
                block, blocks[index] = blocks[index], NULL_BLOCK
                if block == NULL_BLOCK:
                    continue
                if index >= prefill_blocks:
                    self.pool.forget(group, block)
                self.pool.release(group, [block])
                updates.append((group, index, NULL_BLOCK))
            request.trimmed[group] = max(first, kept)
        if self.snapshots:
            updates += self.snapshots.detach(request)
        return updates

    def register(self, request: Request, computed: int) -> None:
        """Names the blocks below position `computed`, whose KV is now known to be there (a prefill
        chunk's end)."""
        last = computed // self.block_tokens
        if request.registers:
            for group in self._shared:
                ratio, kind = self.ratios[group], self.kinds[group]
                begin = max(request.registered // ratio, kind.first_kept(computed))
                for index in range(begin, last // ratio):
                    block = request.blocks[group][index]
                    if block != NULL_BLOCK:
                        digest = self.digest(request, (index + 1) * ratio - 1)
                        self.pool.tag(group, block, digest)
        if request.snapshots:
            self.snapshots.register(request, last, lambda index: self.digest(request, index))
        request.registered = last

    def register_each(self, requests: Sequence[Request], blocks: Sequence[bytes]) -> None:
        """Names the block that each of these decoding requests has just filled with these
        tokens."""
        extend, tag = self.hasher.extend, self.pool.tag
        for request, token_bytes in zip(requests, blocks, strict=True):
            index = request.registered
            request.registered = index + 1
            if not request.registers:
                continue
            chain = request.chain
            assert len(chain) == index, (len(chain), index)
            if request.media:
                start = index * self.block_tokens
                token_bytes += media_mark(request.media, start, start + self.block_tokens)
            digest = extend(chain[-1] if chain else request.chain_start, token_bytes)
            chain.append(digest)
            for group in self._even:
                if (block := request.blocks[group][index]) != NULL_BLOCK:
                    tag(group, block, digest)
            for group in self._uneven:
                full, rest = divmod(index + 1, self.ratios[group])
                if not rest and (block := request.blocks[group][full - 1]) != NULL_BLOCK:
                    tag(group, block, digest)

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Gives back everything the request holds; with `forget` nothing of it can be found
        again."""
        for group, blocks in enumerate(request.blocks):
            held = [block for block in reversed(blocks) if block != NULL_BLOCK]
            if forget:
                for block in held:
                    self.pool.forget(group, block)
            self.pool.release(group, held)
            blocks.clear()
            request.trimmed[group] = 0
        if request.snapshots:
            self.snapshots.release(request, forget=forget)
        request.registered = 0

    def compacts(self, request: Request, tokens: int) -> bool:
        """Whether a request that is alone and finds no block for its last of `tokens` tokens would
        find one if it were computed again from an empty pool, as its blocks then fill their slabs.
        Asked once for a number of tokens; if so nothing is found again by its hash."""
        if tokens <= request.compacted_at or self.least_needed(tokens) > self.pool.num_usable:
            return False
        request.compacted_at = tokens
        self.pool.forget_all()
        return True

    def reset_cache(self, running: Iterable[Request]) -> None:
        """Forgets every hash. What runs now is not named later either: part of its KV is from
        before."""
        self.pool.forget_all()
        self.snapshots.forget_all()
        for request in running:
            request.registers = False

    def _growth(self, request: Request, tokens: int) -> list[int]:
        """Blocks of each group that positions below `tokens` take beyond those held."""
        each = self._each(request, tokens)
        return [
            max(0, kind.num_blocks(length) - len(blocks))
            for (kind, length), blocks in zip(each, request.blocks, strict=True)
        ]

    def _find(self, request: Request, group: int, index: int) -> int | None:
        digest = self.digest(request, (index + 1) * self.ratios[group] - 1)
        if group in self.snapshots:
            return self.snapshots.find(group, digest)
        return self.pool.find(group, digest)

    def _hits(self, request: Request, hit: int) -> list[BlockUpdate]:
        hits: list[BlockUpdate] = []
        for group in self._shared if hit else ():
            size = hit // self.ratios[group]
            for index in range(self.kinds[group].hit_start(size), size):
                block = self._find(request, group, index)
                assert block is not None, (group, index)
                hits.append((group, index, block))
        return hits

    def digest(self, request: Request, index: int) -> bytes:
        """The name of the content of the request's block `index` of the hash chain."""
        chain, size = request.chain, self.block_tokens
        while len(chain) <= index:
            start = len(chain) * size
            parent = chain[-1] if chain else request.chain_start
            token_bytes = request.token_bytes(start, start + size)
            if request.media:
                token_bytes += media_mark(request.media, start, start + size)
            chain.append(self.hasher.extend(parent, token_bytes))
        return chain[index]
