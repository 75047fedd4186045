"""Control vectors of requests: each row of the runner has a direction of its own for each layer,
the sum of those that its request names times their factors, or none.

The directions of a layer lie in a table [rows + 1, E], row 0 zeros: whoever has none has that. A
step says for each token which row it takes (`Batch.steered_T`), so that a recorded step adds those
of its own rows; the tables are written when a request takes its row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class RowDirections:
    """`vectors`: by name and layer, float32 [E]; `rows`: of the runner."""

    def __init__(self, vectors: Mapping[str, Mapping[int, torch.Tensor]], *, rows: int) -> None:
        self.vectors, self._rows = vectors, rows
        self._tables: dict[int, torch.Tensor] = {}

    @property
    def layers(self) -> frozenset[int]:
        """Those behind which any of the vectors adds something."""
        return frozenset(layer for one in self.vectors.values() for layer in one)

    def table(
        self, layer: int, width: int, *, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """The table of a layer, [rows + 1, E], which is kept."""
        table = torch.zeros(self._rows + 1, width, device=device, dtype=dtype)
        self._tables[layer] = table
        return table

    def take(self, row: int, wanted: Mapping[str, float]) -> int:
        """A request takes a row; where in the tables its direction is."""
        if not wanted:
            return 0
        for layer, table_SE in self._tables.items():
            sum_E = torch.zeros(table_SE.shape[1])
            for name, scale in wanted.items():
                vector_E = self.vectors[name].get(layer)
                if vector_E is not None:
                    sum_E += scale * vector_E
            table_SE[row + 1].copy_(sum_E)
        return row + 1


def vector_names(directions: RowDirections | None) -> tuple[str, ...]:
    """Those that requests may name."""
    return () if directions is None else tuple(sorted(directions.vectors))
