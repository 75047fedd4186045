"""bad_words: the last id of a sequence is forbidden while the ids before it are the row's last
tokens.

The prompt counts: a word that the prompt has begun may not be finished.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import FeatureRows
from headrace.back.sampling.ragged import RaggedRows
from headrace.base.wire.step import RowStart


class BadWords:
    """Sequences right-aligned in a table, -1 where a shorter one has nothing: -1 matches any token,
    or none."""

    def __init__(self, device: torch.device) -> None:
        self._words = RaggedRows(device)

    def start(self, start: RowStart) -> None:
        """Keeps the row's sequences."""
        words = [word for word in start.sampling.bad_words if word]
        table = np.full((len(words), max(len(word) for word in words)), -1, np.int64)
        for i, word in enumerate(words):
            table[i, table.shape[1] - len(word) :] = word
        self._words.put(start.row, table)

    def end(self, row: int) -> None:
        """Forgets them."""
        self._words.drop(row)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks the last ids of the sequences that are about to be completed."""
        device = logits_KV.device
        index_M, words_ML = self._words.join(feature_rows.rows)
        before_ML, last_M = words_ML[:, :-1], words_ML[:, -1]
        length = before_ML.shape[1]
        row_M1 = to_device(feature_rows.rows, device)[index_M][:, None]
        start_M1 = to_device(feature_rows.positions, device)[index_M][:, None] - length
        column_ML = start_M1 + torch.arange(length, device=device)
        history_ML = feature_rows.tokens[row_M1, column_ML.clamp(min=0)]
        matches_ML = ((history_ML == before_ML) & (column_ML >= 0)) | (before_ML < 0)
        mask_M = torch.where(matches_ML.all(1), -torch.inf, 0.0).to(logits_KV.dtype)
        logits_KV.index_put_((index_M, last_M), mask_M, accumulate=True)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""
