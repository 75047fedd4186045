"""The permanent rows: what the runner knows of each request between steps. Nothing here is built
per step (batch.py).

T query tokens, R rows of a step, U block updates. Token ids and block tables live on the device,
because sampled tokens are written there and feed the next step there; lengths come with every plan
and need no copy of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.base.wire.step import RowFeed, RowStart, StepPlan


class GrowingTable:
    """An int32 table [rows, columns] on the device, zero at first, whose columns double when they
    run out.

    Memory follows the longest request seen, not the longest that is allowed.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

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

    @staticmethod
    def zeros(*, rows: int, columns: int, device: torch.device) -> GrowingTable:
        """An empty table."""
        return GrowingTable(torch.zeros((rows, columns), dtype=torch.int32, device=device))

    def at(self, row_K: np.ndarray, column_K: np.ndarray) -> torch.Tensor:
        """Where the entries (row_K[i], column_K[i]) lie in the flattened table, int64 [K] on the
        device."""
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
    tables: one per KV group; [max_rows, columns]: column i is the block of tokens i*block_tokens
    num_prompt int32 [max_rows] on the host.
    length_M: int32 [max_rows + 1], tokens of each row, where steps may add several at a time.
    """

    def __init__(
        self,
        tokens: GrowingTable,
        tables: tuple[GrowingTable, ...],
        *,
        block_tokens: int,
        length_M: torch.Tensor | None = None,
    ) -> None:
        self.device = tokens.data.device
        self.block_tokens = block_tokens
        self.tokens = tokens
        self.tables = tables
        self._length_M = length_M
        self.num_prompt = np.zeros(tokens.data.shape[0], np.int32)

    @staticmethod
    def growing(*, max_rows: int, num_groups: int, block_tokens: int, device: torch.device) -> Rows:
        """Empty rows whose tables grow."""
        new = {"rows": max_rows, "device": device}
        tables = (GrowingTable.zeros(**new, columns=256 // block_tokens) for _ in range(num_groups))
        tokens = GrowingTable.zeros(**new, columns=256)
        return Rows(tokens, tuple(tables), block_tokens=block_tokens)

    def apply(self, plan: StepPlan) -> None:
        """Takes over the plan's starts and block updates."""
        self.begin(plan)
        if plan.block_id.size:
            self.update(plan)

    def begin(self, plan: StepPlan) -> None:
        """Takes over the plan's starts and feeds."""
        self.start(plan.starts)
        if plan.feeds:
            self.feed(plan.feeds)

    def start(self, starts: list[RowStart]) -> None:
        """Requests take rows: their tokens are stored and their block tables cleared."""
        if starts:
            rows = to_device(np.array([start.row for start in starts], np.int64), self.device)
            for table in self.tables:
                table.data.index_fill_(0, rows, 0)
            self._set_lengths(rows, [start.tokens.size for start in starts])
        for start in starts:
            self.tokens.reserve(start.tokens.size + 1)
            known = to_device(start.tokens, self.device)
            self.tokens.data[start.row, : start.tokens.size] = known
            self.num_prompt[start.row] = start.num_prompt

    def append(self, row_K: np.ndarray, position_K: np.ndarray, token_K: torch.Tensor) -> None:
        """Each row's newest token, int32 [K] on the device, at its position."""
        self.tokens.put(row_K, position_K, token_K)
        if self._length_M is not None:
            self._set_lengths(to_device(row_K, self.device), position_K + 1)

    def _set_lengths(self, row_K: torch.Tensor, lengths: Sequence[int] | np.ndarray) -> None:
        if self._length_M is not None:
            length_K = to_device(np.asarray(lengths, np.int32), self.device)
            self._length_M.index_copy_(0, row_K, length_K)

    def feed(self, feeds: list[RowFeed]) -> None:
        """Tokens that were not sampled here are stored where they stand."""
        sizes = [feed.tokens.size for feed in feeds]
        row_K = np.repeat(np.array([feed.row for feed in feeds], np.int64), sizes)
        position_K = np.concatenate(
            [np.arange(feed.start, feed.start + feed.tokens.size) for feed in feeds]
        )
        self.tokens.reserve(int(position_K.max()) + 2)
        token_K = np.concatenate([feed.tokens for feed in feeds]).astype(np.int32, copy=False)
        self.tokens.put(row_K, position_K, to_device(token_K, self.device))
        if self._length_M is not None:
            fed = to_device(np.array([feed.row for feed in feeds], np.int64), self.device)
            self._set_lengths(fed, [feed.start + feed.tokens.size for feed in feeds])

    def update(self, plan: StepPlan, *, first: int = 0) -> None:
        """Takes over the plan's block updates, from the `first` on."""
        rows, indices, blocks = (
            part[first:] for part in (plan.block_row, plan.block_index, plan.block_id)
        )
        for group, table in enumerate(self.tables):
            if len(self.tables) == 1:
                row, index, block = rows, indices, blocks
            else:
                mine = plan.block_group[first:] == group
                row, index, block = rows[mine], indices[mine], blocks[mine]
            if not block.size:
                continue
            table.reserve(int(index.max()) + 1)
            table.put(row, index, to_device(block, self.device))
