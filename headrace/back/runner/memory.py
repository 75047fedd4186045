"""How caches share the KV memory: grouping (a pure function), the size of a slab, the number of
slabs, the tensors.

Caches of one kind (full, one size of window, ...) form groups that share block tables. A slab is
what all groups share: it is cut into blocks of one group at a time. There are two layouts:

    by position   groups have equally many caches, and the i-th cache of every group lies in tensor
                  i. A slab is one block of any group; the blocks of a cache are neighbours, which
                  TMA descriptors need. A group that is short of caches leaves its part of the last
                  tensors unused.
    packed        one tensor; a block holds all caches of its group, and a slab several blocks. For
                  caches of unequal bytes or numbers, of which the first layout would waste more
                  than 2 %.

Recurrent state has no blocks: a row of one tensor for each row of the runner, and the last one for
padding; beside it as many rows for snapshots as a part of the memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from headrace.back.attention.forms import CacheForm
from headrace.back.kernels.gated_scan.op import StateTrail
from headrace.back.kernels.step_inputs.op import GroupBlocks
from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
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
SNAPSHOT_SHARE = 8
"""Snapshots take at most one part in so many of the memory."""
SNAPSHOTS_PER_ROW = 4
KIND_ORDER = ("full", "latent", "window", "chunked", "cross", "state")


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

    @property
    def group_of_cache(self) -> tuple[int, ...]:
        """Cache -> index of its group."""
        groups = {cache: i for i, group in enumerate(self.groups) for cache in group.caches}
        return tuple(groups[cache] for cache in range(len(groups)))


def lay_out(forms: Sequence[CacheForm], *, block_tokens: int, dtype: torch.dtype) -> KVLayout:
    """The layout of these caches; `dtype` is that of the model."""
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
    groups, tensor_bytes, places = layout
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
    groups = [replace(g, blocks_per_slab=n) for g, n in zip(groups, per_slab, strict=True)]
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


@dataclass(frozen=True, kw_only=True)
class KVCounts:
    """How much there is: slabs, slab 0 (null, nobody's) included; rows of recurrent state, the
    padding's included; slots for snapshots, slot 0 (nobody's) included; rows of a step that have
    drafts, and drafts of a row, each of which leaves a state behind."""

    num_blocks: int
    state_rows: int = 0
    snapshot_slots: int = 0
    draft_rows: int = 0
    drafts: int = 0

    @property
    def drafted_states(self) -> int:
        """States behind drafts."""
        return self.draft_rows * self.drafts


def count_kv(
    spec: KVSpec, layout: KVLayout, *, max_rows: int, drafting: tuple[int, int] = (0, 0)
) -> KVCounts:
    """What the memory is cut into: state for every row and behind each draft of a step first
    (`drafting`: rows that have drafts, and how many), then snapshots, then slabs. A pool too small
    for one token is refused."""
    least = least_blocks(layout)
    state = layout.state_bytes
    if not state:
        return KVCounts(num_blocks=_count_blocks(spec, layout, least, taken=0))
    rows = max_rows + 1
    share = _budget(spec, layout) // SNAPSHOT_SHARE // state
    slots = 2 if not spec.prefix_caching else 2 + min(share, SNAPSHOTS_PER_ROW * max_rows)
    taken = state * (rows + slots + drafting[0] * drafting[1])
    num_blocks = _count_blocks(spec, layout, least, taken=taken)
    return KVCounts(
        num_blocks=num_blocks,
        state_rows=rows,
        snapshot_slots=slots,
        draft_rows=drafting[0],
        drafts=drafting[1],
    )


def least_blocks(layout: KVLayout) -> int:
    """Slabs with which one token can be computed, whatever an encoder reads, and the null slab."""
    return 1 + sum(_least_of(group, layout.block_tokens) for group in layout.groups)


def _least_of(group: KVGroup, block_tokens: int) -> int:
    if group.kind == "state":
        return 0
    tokens = group.span if group.kind == "cross" and group.span else 1
    return math.ceil(tokens / (block_tokens * group.block_ratio * group.blocks_per_slab))


def least_bytes(layout: KVLayout, *, max_rows: int, drafting: tuple[int, int] = (0, 0)) -> int:
    """Bytes with which one token can be computed in every row. `drafting`: see count_kv."""
    states = max_rows + 3 + drafting[0] * drafting[1]
    state = layout.state_bytes * states if layout.state_bytes else 0
    return least_blocks(layout) * layout.slab_bytes + state


def _budget(spec: KVSpec, layout: KVLayout) -> int:
    if spec.num_blocks is not None:
        return spec.num_blocks * layout.slab_bytes
    assert spec.memory_bytes is not None, "KVSpec has neither num_blocks nor memory_bytes"
    return spec.memory_bytes


def _count_blocks(spec: KVSpec, layout: KVLayout, least: int, *, taken: int) -> int:
    if spec.num_blocks is not None:
        num_blocks = spec.num_blocks
    elif not layout.slab_bytes:
        num_blocks = 1 if _budget(spec, layout) >= taken else 0
    else:
        num_blocks = (_budget(spec, layout) - taken) // layout.slab_bytes
    if num_blocks < least:
        needed = least * layout.slab_bytes + taken
        raise ConfigError(
            f"the KV cache holds {max(0, num_blocks)} blocks of {layout.slab_bytes} bytes; at least "
            f"{least} are needed{_beside_state(taken)}: raise --kv-memory to {needed} bytes or more "
            f"(or --kv-blocks to {least})",
            field="kv_memory",
        )
    return num_blocks


def _beside_state(taken: int) -> str:
    return f" beside {taken} bytes of recurrent state (fewer with --max-running)" if taken else ""


class KVMemory:
    """The KV tensors. `caches[c]` is the view of cache c: [blocks of its group, *block shape], or
    [rows + 1, *shape] of recurrent state.

    `state` [rows + 1, bytes] and `snapshots` [slots, bytes] hold what all recurrent caches of a row
    have, one behind the other; None without such. `trailed` and `trailed_caches` are `state` and
    `caches` with the states behind drafts, as far as there is room for these. Zeroed at start: a
    masked position may be multiplied by an attention weight of zero but never be NaN.
    """

    def __init__(self, layout: KVLayout, counts: KVCounts, *, device: torch.device) -> None:
        self.counts = counts
        self._layout = layout
        self.tensors = tuple(
            _zeros(counts.num_blocks, num_bytes, dtype=torch.uint8, device=device)
            for num_bytes in layout.tensor_bytes
        )
        states = counts.state_rows + counts.drafted_states
        self.trailed, self.snapshots = (
            _zeros(rows, layout.state_bytes, dtype=torch.uint8, device=device) if rows else None
            for rows in (states, counts.snapshot_slots)
        )
        self.state = None if self.trailed is None else self.trailed[: counts.state_rows]
        self.caches, self.trailed_caches = (
            tuple(self._view(form, rows) for form in layout.forms)
            for rows in (counts.state_rows, states)
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._layout.block_tokens

    @property
    def trail(self) -> StateTrail | None:
        """Where the states behind drafts lie; None: there is no room for any."""
        first, depth = self.counts.state_rows, self.counts.drafts
        return StateTrail(first=first, depth=depth) if first and depth else None

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups, with their numbers of slots."""
        slots = self.counts.snapshot_slots
        return tuple(
            replace(group, num_slots=slots) if group.kind == "state" else group
            for group in self._layout.groups
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of everything."""
        return sum(tensor.numel() for tensor in self._all())

    def release(self) -> None:
        """Gives the memory back, also where a kernel still holds a view; on a CPU it goes with the
        last view."""
        for tensor in self._all():
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)

    def scrub(self, group: int, blocks: torch.Tensor) -> None:
        """Replaces what is not finite in these blocks of a group by 0 and leaves every finite
        value, so that a failed row leaves nothing behind for the blocks' next owner. `blocks`
        int64 [B]. A row's recurrent state is reset when the row begins."""
        if self._layout.groups[group].kind == "state":
            return
        for cache in self._layout.groups[group].caches:
            floats = self._layout.forms[cache].floats(self.caches[cache])
            floats[blocks] = floats[blocks].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _all(self) -> tuple[torch.Tensor, ...]:
        state = (tensor for tensor in (self.trailed, self.snapshots) if tensor is not None)
        return (*self.tensors, *state)

    def _view(self, form: CacheForm, states: int) -> torch.Tensor:
        """That of a cache; of recurrent state, of so many rows."""
        layout, place = self._layout, self._layout.places[form.cache]
        group = layout.groups[layout.group_of_cache[form.cache]]
        if form.kind == "state":
            assert self.trailed is not None
            raw, count = self.trailed, states
        else:
            raw = self.tensors[place.tensor]
            count = self.counts.num_blocks * group.blocks_per_slab
        dtype = form.storage_dtype(layout.dtype)
        shape = form.shape_beside(layout.block_tokens)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        size = dtype.itemsize
        return torch.as_strided(
            raw.view(-1).view(dtype),
            (count, *shape),
            (place.stride // size, *strides),
            place.offset // size,
        )


def _zeros(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [rows, columns]. On a CPU by calloc: pages nobody has written cost no memory and no
    time at start."""
    if device.type != "cpu":
        return torch.zeros((rows, columns), dtype=dtype, device=device)
    raw = np.zeros(rows * columns * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(rows, columns)
