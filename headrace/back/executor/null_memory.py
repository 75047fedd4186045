"""The fake KV memory of the null executor: running states, written where a kernel would write keys
and values, so that a wrong table, a slab with two owners or a stale hit shows as a wrong state.

Memory is cells of 64 bits, a slab after the other; a slab has cells for the group that needs most.
Blocks of different groups in one slab overlap, as on a device. Recurrent groups have a state per
row, which the executor keeps, and one cell per snapshot slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base import splitmix
from headrace.base.wire.step import KVGroup, RowStart, WorkerFacts

Ints = npt.NDArray[np.integer]
Int32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

GROUP_MARK = 0xD1B54A32D192ED03
"""Content differs by group: what group g stores is marked with g times this."""


class NullMemory:
    """The cells of all groups. `table` is int32 [groups, rows, columns], positions int [N]."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._groups = facts.groups
        self._base_tokens = facts.block_tokens
        self._marks = [(GROUP_MARK * g) & splitmix.MASK for g in range(len(facts.groups))]
        self._sizes = [facts.block_tokens * group.block_ratio for group in facts.groups]
        paged = [
            group.blocks_per_slab * size
            for group, size in zip(facts.groups, self._sizes, strict=True)
            if group.kind != "state"
        ]
        self._slab_cells = max(paged, default=0)
        self._cells = np.zeros(facts.num_blocks * self._slab_cells, np.uint64)
        self._snapshots = {
            g: np.zeros(max(1, group.num_slots), np.uint64)
            for g, group in enumerate(facts.groups)
            if group.kind == "state"
        }
        self._indexed = [
            g for g, group in enumerate(facts.groups) if group.kind not in ("state", "cross")
        ]

    def write(self, table: Int32, rows: Ints, position: Ints, states: U64) -> None:
        """Stores the state after each of these positions in every group that stores tokens."""
        for group in self._indexed:
            blocks = table[group, rows, position // self._sizes[group]]
            assert blocks.all(), f"a row writes to the null block of group {group}"
            at = self._at(group, blocks, position)
            self._cells[at] = states ^ np.uint64(self._marks[group])

    def write_cross(self, table: Int32, start: RowStart) -> None:
        """Stores what an encoder would have said about this request."""
        for group, spec in enumerate(self._groups):
            if spec.kind == "cross":
                at, states = self._cross(table, group, start)
                self._cells[at] = states

    def check_cross(self, table: Int32, start: RowStart) -> None:
        """The cross caches of the row hold what was stored when it started."""
        row = start.row
        for group, spec in enumerate(self._groups):
            if spec.kind == "cross":
                at, states = self._cross(table, group, start)
                assert (self._cells[at] == states).all(), f"row {row}, group {group}: foreign KV"

    def check_read(self, table: Int32, group: int, row: int, states: U64, first: int) -> None:
        """Everything that a query at `first` reads is there."""
        position = np.arange(_oldest(self._groups[group], first), first)
        blocks = table[group, row, position // self._sizes[group]]
        assert blocks.all(), f"row {row}, group {group}: a block it reads is gone"
        cells = self._cells[self._at(group, blocks, position)] ^ np.uint64(self._marks[group])
        assert (cells == states[position]).all(), f"row {row}, group {group}: foreign KV"

    def check_slabs(self, tables: Int32) -> None:
        """No slab holds blocks of two groups."""
        owners = np.full(len(self._cells) // max(1, self._slab_cells), -1)
        for group, spec in enumerate(self._groups):
            if spec.kind != "state":
                slabs = np.unique(tables[group] // spec.blocks_per_slab)
                mine = slabs[slabs > 0]
                assert (owners[mine] == -1).all(), f"group {group} has slabs of another group"
                owners[mine] = group

    def state_before(self, table: Int32, row: int, position: int) -> int | None:
        """The state before `position`; None if no group holds it. Recurrent groups have it in
        their snapshot."""
        index, inside = divmod(position, self._base_tokens)
        for group, slots in self._snapshots.items():
            slot = int(table[group, row, index - 1])
            assert slot and not inside, f"row {row} starts at {position} without a snapshot"
            return int(slots[slot])
        for group in self._indexed:
            if _oldest(self._groups[group], position) < position:
                block = table[group, row, (position - 1) // self._sizes[group]]
                assert block, f"row {row} starts at {position} without a block for it"
                at = self._at(group, block, np.asarray(position - 1))
                return int(self._cells[at]) ^ self._marks[group]
        return None

    def load_snapshots(self, table: Int32, rows: Int32, position: Ints, states: U64) -> None:
        """Rows whose position ends a block with a snapshot go on from it, as the kernels do."""
        for group, slots in self._snapshots.items():
            chosen, slot = self._entries(table[group], rows, position)
            states[chosen] = slots[slot]

    def save_snapshots(self, table: Int32, rows: Int32, position: Ints, states: U64) -> None:
        """Rows that have reached the end of a block with a snapshot leave their state there."""
        for group, slots in self._snapshots.items():
            chosen, slot = self._entries(table[group], rows, position)
            slots[slot] = states[chosen]

    def _entries(self, table: Int32, rows: Int32, position: Ints) -> tuple[Int32, Int32]:
        ends = (position % self._base_tokens == 0) & (position > 0)
        rows, index = rows[ends], position[ends] // self._base_tokens - 1
        slot = table[rows, index]
        return rows[slot > 0], slot[slot > 0]

    def _at(self, group: int, blocks: Ints, position: Ints) -> Ints:
        """The cells of positions in these blocks."""
        size, per_slab = self._sizes[group], self._groups[group].blocks_per_slab
        slab, inside = blocks // per_slab, blocks % per_slab
        at: Ints = slab.astype(np.int64) * self._slab_cells + inside * size + position % size
        return at

    def _cross(self, table: Int32, group: int, start: RowStart) -> tuple[Ints, U64]:
        span, row = self._groups[group].span, start.row
        assert span is not None and 0 < start.cross_tokens <= span, (start.cross_tokens, span)
        position = np.arange(start.cross_tokens)
        blocks = table[group, row, position // self._sizes[group]]
        assert blocks.all(), f"row {row} has no blocks for the encoder's output"
        seed = np.uint64((int(start.tokens[0]) * 64 + row) & splitmix.MASK)
        return self._at(group, blocks, position), splitmix.mix_all(
            position.astype(np.uint64) + seed
        )


def _oldest(group: KVGroup, position: int) -> int:
    """The first position that a query at `position` reads."""
    if group.kind == "window":
        assert group.span is not None
        return max(0, position - group.span + 1)
    if group.kind == "chunked":
        assert group.span is not None
        return position // group.span * group.span
    return 0
