"""The state of recurrent layers: one row of a tensor per row of the runner, all layers of a row one
behind the other, and snapshots of the same shape.

Layers read and write `batch.kv[cache]` at `batch.row_R`. What a row begins with follows from the
step's own numbers, all on the device: at position 0 its state is reset; at the end of block i, if
entry i of the recurrent group's block table names a snapshot slot, it is loaded from there; else it
goes on. A chunk that ends with such a block leaves its state in the slot (core/kv/pool.py).

R rows of the step, M rows of the runner, S snapshot slots, Z bytes of a row.
"""

from __future__ import annotations

import torch

from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.runner.memory import KVMemory
from headrace.back.runner.states.plain import PlainDecoder


class Recurrent(PlainDecoder):
    """The ModelState of models with recurrent layers.

    A step that ran in part has changed its rows' state, so that none is run twice."""

    repeatable = False

    def __init__(self, memory: KVMemory) -> None:
        assert memory.state is not None and memory.snapshots is not None
        self._state_MZ, self._snapshots_SZ = memory.state, memory.snapshots
        self._block_tokens = memory.block_tokens
        kinds = [group.kind for group in memory.groups]
        self._group = kinds.index("state")

    def before(self, batch: Batch) -> None:
        """Resets the rows that begin, loads those that begin behind a snapshot."""
        plan, row_R = self._rows(batch)
        query_R = plan.query_start_R1[1:] - plan.query_start_R1[:-1]
        start_R = plan.kv_len_R - query_R
        slot_R = self._slots(plan, start_R)
        own_RZ = self._state_MZ.index_select(0, row_R)
        from_RZ = self._snapshots_SZ.index_select(0, slot_R)
        begin_RZ = torch.where((slot_R > 0)[:, None], from_RZ, own_RZ)
        begin_RZ.masked_fill_((start_R <= 0)[:, None], 0)
        self._state_MZ.index_copy_(0, row_R, begin_RZ)

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        """Keeps the state of rows whose chunk ends with a block that has a slot; slot 0, nobody's,
        takes the others'."""
        plan, row_R = self._rows(batch)
        slot_R = self._slots(plan, plan.kv_len_R)
        self._snapshots_SZ.index_copy_(0, slot_R, self._state_MZ.index_select(0, row_R))

    def _rows(self, batch: Batch) -> tuple[AttentionPlan, torch.Tensor]:
        assert batch.row_R is not None
        return batch.plans[self._group], batch.row_R.long()

    def _slots(self, plan: AttentionPlan, position_R: torch.Tensor) -> torch.Tensor:
        """int64 [R]: the snapshot slot at the end of the block before each position; 0 where the
        position is inside a block, or the block has none."""
        size, last = self._block_tokens, plan.block_table_RB.shape[1] - 1
        index_R = torch.div(position_R, size, rounding_mode="floor").long() - 1
        entry_R1 = plan.block_table_RB.gather(1, index_R.clamp(min=0, max=last)[:, None])
        ends_R = (position_R % size == 0) & (index_R >= 0)
        return torch.where(ends_R, entry_R1[:, 0], 0).long()
