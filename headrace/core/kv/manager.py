"""KV blocks of requests: finding cached ones, taking, giving back, and naming what has been computed.

All groups draw from one pool. A request's block lists have the same length in every group; a window group holds 0 (the
null block) where it has given a block back. Decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.base.errors import ContextTooLong
from headrace.base.wire.step import WorkerFacts
from headrace.core.kv.groups import capacity_blocks, common_hit, kind_of, least_blocks
from headrace.core.kv.pool import NULL_BLOCK, BlockPool
from headrace.core.kv.prefix import PrefixHasher
from headrace.core.request import Request

Int32 = npt.NDArray[np.int32]
BlockUpdate = tuple[int, int, int]  # group, block index, block id


class KVManager:
    """The KV cache as the scheduler sees it. `chunk_tokens` is the most one request computes in a step.

    A model without KV groups (an encoder) takes no blocks: everything fits, nothing is found again.
    """

    def __init__(
        self,
        facts: WorkerFacts,
        *,
        prefix_caching: bool,
        chunk_tokens: int,
        hash_key: bytes | None = None,
    ) -> None:
        self.block_tokens = facts.block_tokens
        self.prefix_caching = prefix_caching and bool(facts.groups)
        self.kinds = tuple(
            kind_of(group, block_tokens=facts.block_tokens, prefix_caching=prefix_caching)
            for group in facts.groups
        )
        self.pool = BlockPool(facts.num_blocks, len(self.kinds))
        self.windows = [g for g, kind in enumerate(self.kinds) if kind.is_window]
        self._hasher = PrefixHasher(hash_key)
        self._chunk_blocks = -(-chunk_tokens // self.block_tokens)
        bound = -(-facts.max_model_len // self.block_tokens)
        held = capacity_blocks(self.kinds, self.pool.num_usable, bound=bound)
        self.capacity_tokens = min(held * self.block_tokens, facts.max_model_len)
        self.num_queries = 0
        self.num_hits = 0

    def blocks_of(self, tokens: int) -> int:
        """Blocks of positions that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def least_needed(self, tokens: int) -> int:
        """The fewest pool blocks with which a request of so many tokens can run."""
        return least_blocks(self.kinds, self.blocks_of(tokens))

    def never_fits(self, tokens: int) -> ContextTooLong:
        """The error of a request whose tokens the pool can never hold."""
        return ContextTooLong(
            f"{tokens} tokens need {self.least_needed(tokens)} KV blocks, {self.pool.num_usable} are available "
            f"({self.capacity_tokens} tokens at most)",
            field="prompt",
        )

    def match(self, request: Request) -> int:
        """How many blocks of the request's tokens are cached in all groups. One token is always left to compute."""
        if not self.prefix_caching:
            return 0
        if not request.chain_start:
            wire = request.wire
            request.chain_start = self._hasher.start(
                tenant=wire.tenant, salt=wire.cache_salt, extra_keys=wire.extra_keys
            )
        if request.needs_whole_prompt:
            return 0
        find, digest = self.pool.find, self._digest
        end = (request.num_tokens - 1) // self.block_tokens
        return common_hit(self.kinds, lambda g, i: find(g, digest(request, i)) is not None, end)

    def need(self, request: Request, hit: int) -> int:
        """Free blocks that the whole of the request's tokens will take from the pool, after a hit of `hit` blocks."""
        fresh = self.blocks_of(request.num_tokens) - hit
        new = sum(kind.most_held(fresh, self._chunk_blocks) for kind in self.kinds)
        return new + sum(self.pool.refs(block) == 0 for _, _, block in self._hits(request, hit))

    def attach(self, request: Request, hit: int) -> list[BlockUpdate]:
        """Gives the request its first `hit` blocks out of the cache."""
        found = self._hits(request, hit)
        self.pool.hold([block for _, _, block in found])
        for group, kind in enumerate(self.kinds):
            request.trimmed[group] = kind.hit_start(hit)
            request.blocks[group] = [NULL_BLOCK] * hit
        for group, index, block in found:
            request.blocks[group][index] = block
        request.registered = hit
        request.prefill_blocks = request.num_tokens // self.block_tokens
        request.registers = self.prefix_caching
        if self.prefix_caching and not request.needs_whole_prompt:
            self.num_queries += request.num_tokens
            self.num_hits += hit * self.block_tokens
        return found

    def fit(self, request: Request, *, start: int, want: int) -> int:
        """How many of `want` tokens from position `start` on the free blocks allow."""
        if not self.kinds:
            return want
        held = len(request.blocks[0]) * self.block_tokens - start
        return min(want, held + self.pool.num_free // len(self.kinds) * self.block_tokens)

    def extend(self, request: Request, tokens: int) -> list[BlockUpdate]:
        """Takes the blocks for positions below `tokens`; the caller has asked `fit`."""
        if not self.kinds:
            return []
        first = len(request.blocks[0])
        count = self.blocks_of(tokens) - first
        if count <= 0:
            return []
        updates: list[BlockUpdate] = []
        for group, blocks in enumerate(request.blocks):
            taken = self.pool.take(count)
            blocks.extend(taken)
            updates.extend((group, first + i, block) for i, block in enumerate(taken))
        return updates

    def extend_each(self, requests: Sequence[Request]) -> tuple[Int32, list[Int32]]:
        """Takes the next block of each request in every group: their common indices [N], and ids [N] per group."""
        index = np.asarray([len(request.blocks[0]) for request in requests], np.int32)
        ids: list[Int32] = []
        for group in range(len(self.kinds)):
            taken = self.pool.take(len(requests))
            for request, block in zip(requests, taken, strict=True):
                request.blocks[group].append(block)
            ids.append(np.asarray(taken, np.int32))
        return index, ids

    def trim(self, request: Request, position: int) -> list[BlockUpdate]:
        """Gives back the blocks that have left every window when the next token is at `position`.

        Those filled while decoding lose their hash: only a run that reaches the window's end can be hit. Those that
        were in the window at the end of a prefill chunk keep it: prompts are continued from there (ENG-08).
        """
        updates: list[BlockUpdate] = []
        for group in self.windows:
            blocks = request.blocks[group]
            first, kept = request.trimmed[group], self.kinds[group].first_kept(position)
            for index in range(first, kept):
                block, blocks[index] = blocks[index], NULL_BLOCK
                if index >= request.prefill_blocks:
                    self.pool.forget(block)
                self.pool.release([block])
                updates.append((group, index, NULL_BLOCK))
            request.trimmed[group] = max(first, kept)
        return updates

    def register(self, request: Request, computed: int) -> None:
        """Names the blocks below position `computed`, whose KV is now known to be there (a prefill chunk's end)."""
        last = computed // self.block_tokens
        if request.registers:
            for group, kind in enumerate(self.kinds):
                for index in range(max(request.registered, kind.first_kept(computed)), last):
                    block = request.blocks[group][index]
                    if block != NULL_BLOCK:
                        self.pool.tag(block, group, self._digest(request, index))
        request.registered = last

    def register_each(self, requests: Sequence[Request], blocks: Sequence[bytes]) -> None:
        """Names the block that each of these decoding requests has just filled with these tokens."""
        extend, tag = self._hasher.extend, self.pool.tag
        for request, token_bytes in zip(requests, blocks, strict=True):
            index = request.registered
            request.registered = index + 1
            if not request.registers:
                continue
            chain = request.chain
            assert len(chain) == index, (len(chain), index)
            digest = extend(chain[-1] if chain else request.chain_start, token_bytes)
            chain.append(digest)
            for group, held in enumerate(request.blocks):
                if held[index] != NULL_BLOCK:
                    tag(held[index], group, digest)

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Gives back everything the request holds; with `forget` nothing of it can be found again."""
        for group, blocks in enumerate(request.blocks):
            held = [block for block in reversed(blocks) if block != NULL_BLOCK]
            if forget:
                for block in held:
                    self.pool.forget(block)
            self.pool.release(held)
            blocks.clear()
            request.trimmed[group] = 0
        request.registered = 0

    def reset_cache(self, running: Sequence[Request]) -> None:
        """Forgets every hash. What runs now is not named later either: part of its KV is from before."""
        self.pool.forget_all()
        for request in running:
            request.registers = False

    def _hits(self, request: Request, hit: int) -> list[BlockUpdate]:
        found: list[BlockUpdate] = []
        for group, kind in enumerate(self.kinds):
            for index in range(kind.hit_start(hit), hit):
                block = self.pool.find(group, request.chain[index])
                assert block is not None
                found.append((group, index, block))
        return found

    def _digest(self, request: Request, index: int) -> bytes:
        chain, size = request.chain, self.block_tokens
        while len(chain) <= index:
            start = len(chain) * size
            parent = chain[-1] if chain else request.chain_start
            chain.append(self._hasher.extend(parent, request.token_bytes(start, start + size)))
        return chain[index]
