"""How caches share the KV memory: grouping, the size of a slab, where each cache lies; pure
functions of the caches' forms. What is made of it: memory.py.

Caches of one kind (full, one size of window, ...) form groups that share block tables. A slab is
what all groups share: it is cut into blocks of one group at a time. There are two layouts:

    by position   groups have equally many caches, and the i-th cache of every group lies in tensor
                  i. A slab is one block of any group; the blocks of a cache are neighbours, which
                  TMA descriptors need. A group that is short of caches leaves its part of the last
                  tensors unused.
    packed        one tensor; a block holds all caches of its group, and a slab several blocks. For
                  caches of unequal bytes or numbers, of which the first layout would waste more
                  than 2 %.

The first is made of one tensor where `--kv-layout blocks` asks for it: what a block of a group has
in all layers is then one range of bytes, which is copied to other places at once.

Recurrent state has no blocks: a row of one tensor for each row of the runner, and the last one for
padding; beside it as many rows for snapshots as a part of the memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec.structs import replace as with_fields

from headrace.back.attention.forms import CacheForm
from headrace.back.kernels.step_inputs.op import GroupBlocks
from headrace.base.wire.step import KVGroup

MAX_GROUPS = 8
"""Each group costs a block table per row and an attention plan per step; more groups are not worth
less waste."""
MAX_WASTE = 0.02
"""The part of a group's memory that unequal sizes may leave unused."""
MOST_BLOCKS = 128
"""Blocks of the largest size in a slab, at most; more where the slab is small all the same."""
SMALL_SLAB = 32 << 20
ALIGNMENT = 16
"""Bytes: what a TMA descriptor asks of addresses and strides."""
KIND_ORDER = ("full", "latent", "patches", "window", "chunked", "cross", "state")


@dataclass(frozen=True, kw_only=True)
class CachePlace:
    """Where a cache lies: in which tensor, its first byte, and the bytes from block to block."""

    tensor: int
    offset: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Where each cache lies. `tensor_bytes[i]`: bytes of a slab in KV tensor i. `places`: cache ->
    its place; of recurrent state within a row's bytes."""

    forms: tuple[CacheForm, ...]
    groups: tuple[KVGroup, ...]
    tensor_bytes: tuple[int, ...]
    places: dict[int, CachePlace]
    block_tokens: int
    dtype: torch.dtype

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab over all KV tensors."""
        return sum(self.tensor_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's recurrent state."""
        return sum(group.block_bytes for group in self.groups if group.kind == "state")

    @property
    def group_blocks(self) -> tuple[GroupBlocks, ...]:
        """The blocks of each group; empty if all grow with the row and are of `block_tokens`."""
        blocks = tuple(
            GroupBlocks(
                tokens=self.block_tokens * group.block_ratio,
                span=group.span or 0 if group.kind == "cross" else 0,
            )
            for group in self.groups
        )
        return blocks if set(blocks) - {GroupBlocks(tokens=self.block_tokens)} else ()

    def ranges(self, group: KVGroup) -> list[tuple[CachePlace, int]]:
        """Where a block of the group lies: of each cache a range, with its bytes; caches that are
        neighbours have one together."""
        ranges: list[tuple[CachePlace, int]] = []
        for cache in group.caches:
            place, size = self.places[cache], self._size(cache)
            before, length = ranges[-1] if ranges else (None, 0)
            if before is not None and place == replace(before, offset=before.offset + length):
                ranges[-1] = before, length + size
            else:
                ranges.append((place, size))
        return ranges

    def _size(self, cache: int) -> int:
        form = self.forms[cache]
        return _aligned(form.block_bytes(self.block_tokens, self.dtype), ALIGNMENT)

    @property
    def group_of_cache(self) -> tuple[int, ...]:
        """Cache -> index of its group."""
        groups = {cache: i for i, group in enumerate(self.groups) for cache in group.caches}
        return tuple(groups[cache] for cache in range(len(groups)))


def lay_out(
    forms: Sequence[CacheForm], *, block_tokens: int, dtype: torch.dtype, order: str = "layers"
) -> KVLayout:
    """The layout of these caches; `dtype` is that of the model. `order`: what are neighbours, the
    blocks of a layer ("layers") or the layers of a block ("blocks")."""
    ordered = tuple(sorted(forms, key=lambda form: form.cache))
    assert [form.cache for form in ordered] == list(range(len(ordered))), ordered
    sizes = {
        form.cache: _aligned(form.block_bytes(block_tokens, dtype), ALIGNMENT) for form in ordered
    }
    kinds: Kinds = {}
    for form in ordered:
        kind = KIND_ORDER.index(form.kind), form.span or 0, form.block_ratio(block_tokens)
        kinds.setdefault(kind, []).append(form.cache)
    states = kinds.pop((KIND_ORDER.index("state"), 0, 1), [])
    layout = _by_position(kinds, sizes)
    if _waste(layout) > MAX_WASTE:
        layout = min(layout, _packed(kinds, sizes), key=_waste)
    groups, tensor_bytes, places = _joined(layout) if order == "blocks" else layout
    if states:
        groups.append(_state_group(states, sizes, places))
    return KVLayout(
        forms=ordered,
        groups=tuple(groups),
        tensor_bytes=tuple(tensor_bytes),
        places=places,
        block_tokens=block_tokens,
        dtype=dtype,
    )


Kinds = dict[tuple[int, int, int], list[int]]
"""Caches by kind (its place in KIND_ORDER), span and block ratio."""
Layout = tuple[list[KVGroup], list[int], dict[int, CachePlace]]


def _by_position(kinds: Kinds, sizes: dict[int, int]) -> Layout:
    """Groups of nearly equal numbers of caches, the largest caches first; a slab is a block."""
    count = _group_size([len(caches) for caches in kinds.values()])
    members: list[tuple[tuple[int, int, int], list[int]]] = []
    for kind, caches in sorted(kinds.items()):
        ordered = sorted(caches, key=lambda cache: -sizes[cache])
        members += [
            (kind, ordered[start : start + count]) for start in range(0, len(ordered), count)
        ]
    tensor_bytes = [
        max(sizes[caches[i]] for _, caches in members if i < len(caches)) for i in range(count)
    ]
    groups, places = [], {}
    for kind, caches in members:
        groups.append(_group(kind, caches, sizes))
        for i, cache in enumerate(caches):
            places[cache] = CachePlace(tensor=i, offset=0, stride=tensor_bytes[i])
    return groups, tensor_bytes, places


def _group_size(counts: list[int]) -> int:
    """Caches of a group: those that waste the fewest padded ones among the sizes that give at most
    MAX_GROUPS groups (or as few groups as there are kinds); of equal ones the largest."""

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    most = max(MAX_GROUPS, len(counts))
    sizes = [size for size in range(1, max(counts, default=0) + 1) if groups(size) <= most]
    return min(sizes, key=lambda size: (groups(size) * size - sum(counts), -size), default=0)


def _waste(layout: Layout) -> float:
    """The largest part of a slab that blocks of one group leave unused."""
    groups, tensor_bytes, _ = layout
    used = [group.blocks_per_slab * group.block_bytes for group in groups]
    return 1.0 - min(used) / sum(tensor_bytes) if used else 0.0


def _joined(layout: Layout) -> Layout:
    """The same slabs in one tensor."""
    groups, tensor_bytes, places = layout
    total = sum(tensor_bytes)
    joined = {
        cache: CachePlace(
            tensor=0, offset=sum(tensor_bytes[: place.tensor]) + place.offset, stride=total
        )
        for cache, place in places.items()
    }
    return (groups, [total], joined) if len(tensor_bytes) > 1 else layout


def _packed(kinds: Kinds, sizes: dict[int, int]) -> Layout:
    """One group for each kind, a block of which holds all its caches one behind the other."""
    groups = [_group(kind, caches, sizes) for kind, caches in sorted(kinds.items())]
    slab, per_slab = slab_of([group.block_bytes for group in groups])
    places: dict[int, CachePlace] = {}
    for group, count in zip(groups, per_slab, strict=True):
        offset = 0
        for cache in group.caches:
            places[cache] = CachePlace(tensor=0, offset=offset, stride=slab // count)
            offset += sizes[cache]
    groups = [with_fields(g, blocks_per_slab=n) for g, n in zip(groups, per_slab, strict=True)]
    return groups, [slab], places


def slab_of(block_bytes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The bytes of a slab, and how many blocks of each size it is cut into: the smallest that
    wastes at most MAX_WASTE for every size. Cut evenly, so that a block is found by one stride,
    which is a multiple of ALIGNMENT."""
    sizes = sorted({size // ALIGNMENT for size in block_bytes}, reverse=True)
    widest = int(sizes[0] / (1 - MAX_WASTE))
    best = (math.inf, 0)
    for count in range(1, max(MOST_BLOCKS, SMALL_SLAB // (sizes[0] * ALIGNMENT)) + 1):
        for stride in range(sizes[0], widest + 1):
            slab = count * stride
            best = min(best, (max(_waste_of(slab, size) for size in sizes), slab))
            if best[0] <= MAX_WASTE:
                break
        if best[0] <= MAX_WASTE:
            break
    slab = best[1]
    counts = tuple(_blocks_of(slab, size // ALIGNMENT) for size in block_bytes)
    return slab * ALIGNMENT, counts


MOST_CUTS = 64


def _blocks_of(slab: int, size: int) -> int:
    """Blocks that a slab is cut into evenly: of the largest numbers that fit the first that divides
    it, or 1."""
    most = slab // size
    numbers = range(most, max(0, most - MOST_CUTS), -1)
    return next((number for number in numbers if slab % number == 0), 1)


def _waste_of(slab: int, size: int) -> float:
    return 1 - _blocks_of(slab, size) * size / slab


def _state_group(
    states: list[int], sizes: dict[int, int], places: dict[int, CachePlace]
) -> KVGroup:
    group = _group((KIND_ORDER.index("state"), 0, 1), states, sizes)
    offset = 0
    for cache in states:
        places[cache] = CachePlace(tensor=0, offset=offset, stride=group.block_bytes)
        offset += sizes[cache]
    return group


def _group(kind: tuple[int, int, int], caches: list[int], sizes: dict[int, int]) -> KVGroup:
    return KVGroup(
        kind=KIND_ORDER[kind[0]],
        caches=tuple(caches),
        span=kind[1] or None,
        block_ratio=kind[2],
        block_bytes=sum(sizes[cache] for cache in caches),
    )


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
