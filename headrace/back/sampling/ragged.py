"""Lists of token ids per row, of any length, joined for one step without a loop in the steady
state.

The joined arrays are kept until another set of rows is asked for or a row changes: in steady decode
the same rows come step after step.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device


class RaggedRows:
    """Per row an int64 array [M, columns] (M differs by row); `join` concatenates the arrays of
    some rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, np.ndarray] = {}
        self._asked = b""
        self._joined: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, row: int, entries: np.ndarray) -> None:
        """Sets the entries of a row, [M, columns]."""
        self._rows[row] = entries
        self._joined = None

    def drop(self, row: int) -> None:
        """Forgets a row."""
        self._rows.pop(row, None)
        self._joined = None

    def join(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(index [M] of the row within `rows`, entries [M, columns]), on the device."""
        asked = rows.tobytes()
        if self._joined is None or asked != self._asked:
            parts = [self._rows[int(row)] for row in rows]
            index = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            columns = max(part.shape[1] for part in parts)
            parts = [
                np.pad(p, ((0, 0), (columns - p.shape[1], 0)), constant_values=-1) for p in parts
            ]
            self._asked = asked
            self._joined = (
                to_device(index, self._device),
                to_device(np.concatenate(parts), self._device),
            )
        return self._joined
