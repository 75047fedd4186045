"""allowed_token_ids: nothing else may be sampled."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.sampling.features import FeatureRows
from headrace.back.sampling.ragged import RaggedRows
from headrace.base.wire.step import RowStart


class AllowedIds:
    """Sets every logit but those of the allowed ids to -Inf."""

    def __init__(self, device: torch.device) -> None:
        self._ids = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's ids."""
        self._ids.put(start.row, np.array(start.sampling.allowed_ids, np.int64).reshape(-1, 1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._ids.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks what is not allowed."""
        index_M, ids_M1 = self._ids.join(feature_rows.rows)
        kept_M = logits_KV[index_M, ids_M1[:, 0]]
        logits_KV.fill_(-torch.inf)
        logits_KV.index_put_((index_M, ids_M1[:, 0]), kept_M)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""
