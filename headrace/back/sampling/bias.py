"""logit_bias: adds a number to the logits of the tokens that are named."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.sampling.features import FeatureRows
from headrace.back.sampling.ragged import RaggedRows
from headrace.base.wire.step import RowStart


class LogitBias:
    """Entries (token id, bits of the float64 bias)."""

    def __init__(self, device: torch.device) -> None:
        self._entries = RaggedRows(device)
        self._split: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def start(self, start: RowStart) -> None:
        """Keeps the row's pairs."""
        bias = start.sampling.logit_bias
        values = np.fromiter(bias.values(), np.float64, len(bias))
        ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._entries.put(start.row, np.stack([ids, values.view(np.int64)], axis=1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._entries.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Adds the biases. A row names an id once, so that no sum over equal places is needed."""
        index_M, entries_M2 = self._entries.join(feature_rows.rows)
        if self._split is None or self._split[0] is not entries_M2:
            id_M, bits_M = (column.contiguous() for column in entries_M2.unbind(1))
            self._split = entries_M2, id_M, bits_M.view(torch.float64).to(logits_KV.dtype)
        _, id_M, value_M = self._split
        logits_KV[index_M, id_M] += value_M

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""
