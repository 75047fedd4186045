"""The KV memory itself: how much of it there is, and the tensors, laid out by kv_layout.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from headrace.back.attention.forms import CacheForm
from headrace.back.kernels.gated_scan.op import StateTrail
from headrace.back.runner.kv_layout import KVLayout
from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup

SNAPSHOT_SHARE = 8
"""Snapshots take at most one part in so many of the memory."""
SNAPSHOTS_PER_ROW = 4


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

    def ranges(self, group: int) -> tuple[torch.Tensor, ...]:
        """Where the blocks of a group lie, uint8 [blocks, bytes] each: of every cache a range, or
        one of those that are neighbours. Together they have `block_bytes` in the order of the
        group's caches, however these lie. Of recurrent state the snapshots."""
        own = self._layout.groups[group]
        if own.kind == "state":
            assert self.snapshots is not None
            return (self.snapshots,)
        count = self.counts.num_blocks * own.blocks_per_slab
        return tuple(
            torch.as_strided(
                self.tensors[place.tensor].view(-1), (count, size), (place.stride, 1), place.offset
            )
            for place, size in self._layout.ranges(own)
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
