"""logit_bias: adds a number to the logits of the tokens that are named."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.sampling.features import Picked
from headrace.back.sampling.ragged import RaggedRows
from headrace.base.wire.step import RowStart


class LogitBias:
    """Entries (token id, bits of the float64 bias)."""

    def __init__(self, device: torch.device) -> None:
        self._entries = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's pairs."""
        bias = start.sampling.logit_bias
        values = np.fromiter(bias.values(), np.float64, len(bias))
        ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._entries.put(start.row, np.stack([ids, values.view(np.int64)], axis=1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._entries.drop(row)

    def apply(self, logits_KV: torch.Tensor, picked: Picked) -> None:
        """Adds the biases."""
        index_M, entries_M2 = self._entries.join(picked.rows)
        value_M = entries_M2[:, 1].contiguous().view(torch.float64).to(logits_KV.dtype)
        logits_KV.index_put_((index_M, entries_M2[:, 0]), value_M, accumulate=True)

    def sampled(self, token_K: torch.Tensor, picked: Picked) -> None:
        """Nothing to count."""
