"""min_tokens: stop tokens cannot be sampled before so many tokens are out."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import FeatureRows
from headrace.back.sampling.ragged import RaggedRows
from headrace.base.wire.step import RowStart


class MinTokens:
    """Sets the suppressed ids of rows with fewer than `min_tokens` output tokens to -Inf."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._min_tokens = np.zeros(max_rows, np.int64)
        self._ids = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's bound and ids."""
        self._min_tokens[start.row] = start.sampling.min_tokens
        self._ids.put(start.row, np.array(start.sampling.suppressed_ids, np.int64).reshape(-1, 1))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._ids.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks the ids of the rows that are still short."""
        short_K = feature_rows.num_output < self._min_tokens[feature_rows.rows]
        if not short_K.any():
            return
        index_M, ids_M1 = self._ids.join(feature_rows.rows)
        mask_K = np.where(short_K, -np.inf, 0.0).astype(np.float32)
        mask_M = to_device(mask_K, logits_KV.device)[index_M]
        logits_KV.index_put_((index_M, ids_M1[:, 0]), mask_M, accumulate=True)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""
