"""The state of recurrent layers: one row of a tensor per row of the runner, all layers of a row one
behind the other, and snapshots of the same shape.

Layers read and write `batch.kv[cache]` at `batch.row_R`. What a row begins with follows from the
step's own numbers, all on the device: at position 0 its state is reset; at the end of block i, if
entry i of the recurrent group's block table names a snapshot slot, it is loaded from there; else it
goes on. A chunk that ends with such a block leaves its state in the slot (core/kv/pool.py).
Both are ops (kernels/state_rows), so that steps with recurrent layers are recorded as others are.

A step that verifies drafts leaves the state behind each of its tokens: that of a row's first token,
which stands, in the row, the others behind all rows (StateTrail). Once it is known which drafts
stand, the last of their states becomes the row's (kernels/state_return), so that the next step
finds what a plain one would have left. Such steps keep no snapshots.

M rows of the runner, S snapshot slots, Z bytes of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.state_return.op import OP as RETURN_OP
from headrace.back.kernels.state_return.op import StateReturn, StateReturnProblem
from headrace.back.kernels.state_rows.op import BEGIN_OP, KEEP_OP, StateRows, StateRowsProblem
from headrace.back.runner.memory import KVMemory
from headrace.back.runner.states.plain import PlainDecoder


class Recurrent(PlainDecoder):
    """The ModelState of models with recurrent layers.

    A step that ran in part has changed its rows' state, so that none is run twice."""

    repeatable = False

    def __init__(self, memory: KVMemory) -> None:
        assert memory.state is not None and memory.snapshots is not None
        self._memory = memory
        self._state_MZ, self._snapshots_SZ = memory.state, memory.snapshots
        device = memory.state.device.type
        problem = StateRowsProblem(device=device, block_tokens=memory.block_tokens)
        self._return: StateReturn | None = None
        if memory.trail is not None:
            back = StateReturnProblem(device=device, trail=memory.trail)
            self._return = RETURN_OP.choose(back).bind()
        self._begin = BEGIN_OP.choose(problem).bind()
        self._keep = KEEP_OP.choose(problem).bind()
        kinds = [group.kind for group in memory.groups]
        self._group = kinds.index("state")

    def before(self, batch: Batch) -> None:
        """Resets the rows that begin, loads those that begin behind a snapshot."""
        self._move(self._begin, batch)

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        """Keeps the state of rows whose chunk ends with a block that has a slot."""
        if batch.trail is None:
            self._move(self._keep, batch)

    def verifying(self, batch: Batch) -> Batch:
        """The batch with room for the states behind drafts."""
        memory = self._memory
        assert memory.trail is not None, "there is no room for states behind drafts"
        return replace(batch, kv=memory.trailed_caches, trail=memory.trail)

    def accept(self, batch: Batch, length_M: torch.Tensor) -> None:
        """Each row's state is that behind the last draft that stands."""
        plan, row_R, state_XZ = batch.plans[self._group], batch.row_R, self._memory.trailed
        assert self._return is not None and row_R is not None and state_XZ is not None
        self._return(row_R, plan.query_start_R1, plan.kv_len_R, length_M, state_XZ)

    def _move(self, state_rows: StateRows, batch: Batch) -> None:
        plan, row_R = batch.plans[self._group], batch.row_R
        assert row_R is not None
        numbers = plan.query_start_R1, plan.kv_len_R, plan.block_table_RB
        state_rows(row_R, *numbers, self._state_MZ, self._snapshots_SZ)
