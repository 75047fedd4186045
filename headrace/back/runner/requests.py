"""The permanent rows: what the runner knows of each request between steps. Nothing here is built per step (batch.py).

T query tokens, R rows of a step, U block updates. Token ids and block tables live on the device, because sampled tokens
are written there and feed the next step there; lengths come with every plan and need no copy of their own.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.wire.step import RowStart, StepPlan


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on the CPU a writable array is shared, not copied."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class GrowingTable:
    """An int32 table [rows, columns] on the device, zero at first, whose columns double when they run out.

    Memory follows the longest request seen, not the longest that is allowed.
    """

    def __init__(self, *, rows: int, columns: int, device: torch.device) -> None:
        self.data = torch.zeros((rows, columns), dtype=torch.int32, device=device)

    def reserve(self, columns: int) -> None:
        """Makes sure of at least `columns` columns; what is stored stays."""
        rows, have = self.data.shape
        if columns <= have:
            return
        wider = torch.zeros(
            (rows, max(columns, 2 * have)), dtype=torch.int32, device=self.data.device
        )
        wider[:, :have] = self.data
        self.data = wider

    def at(self, row_K: np.ndarray, column_K: np.ndarray) -> torch.Tensor:
        """Where the entries (row_K[i], column_K[i]) lie in the flattened table, int64 [K] on the device."""
        return to_device(row_K * np.int64(self.data.shape[1]) + column_K, self.data.device)

    def take(self, row_K: np.ndarray, column_K: np.ndarray) -> torch.Tensor:
        """The entries (row_K[i], column_K[i]), int32 [K]."""
        return self.data.view(-1).index_select(0, self.at(row_K, column_K))

    def put(self, row_K: np.ndarray, column_K: np.ndarray, value_K: torch.Tensor) -> None:
        """Sets entries; value int32 [K] on the device."""
        self.data.view(-1).index_copy_(0, self.at(row_K, column_K), value_K)


class Rows:
    """Tokens, block tables and prompt lengths of all rows.

    tokens [max_rows, columns]: column p is the token at position p.
    tables: one per KV group; [max_rows, columns]: column i is the block of tokens i*block_tokens ...
    num_prompt int32 [max_rows] on the host.
    """

    def __init__(
        self, *, max_rows: int, num_groups: int, block_tokens: int, device: torch.device
    ) -> None:
        self.device = device
        self.block_tokens = block_tokens
        self.tokens = GrowingTable(rows=max_rows, columns=256, device=device)
        self.tables = tuple(
            GrowingTable(rows=max_rows, columns=256 // block_tokens, device=device)
            for _ in range(num_groups)
        )
        self.num_prompt = np.zeros(max_rows, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Takes over the plan's starts and block updates."""
        if plan.starts:
            self._clear_tables([start.row for start in plan.starts])
            for start in plan.starts:
                self._start(start)
        if plan.block_id.size:
            self._update_blocks(plan)

    def _clear_tables(self, rows: list[int]) -> None:
        index = to_device(np.array(rows, np.int64), self.device)
        for table in self.tables:
            table.data.index_fill_(0, index, 0)

    def _start(self, start: RowStart) -> None:
        self.tokens.reserve(start.tokens.size + 1)
        known = to_device(start.tokens, self.device)
        self.tokens.data[start.row, : start.tokens.size] = known
        self.num_prompt[start.row] = start.num_prompt

    def _update_blocks(self, plan: StepPlan) -> None:
        for group, table in enumerate(self.tables):
            if len(self.tables) == 1:
                row, index, block = plan.block_row, plan.block_index, plan.block_id
            else:
                mine = plan.block_group == group
                row, index = plan.block_row[mine], plan.block_index[mine]
                block = plan.block_id[mine]
            if not block.size:
                continue
            table.reserve(int(index.max()) + 1)
            table.put(row, index, to_device(block, self.device))
