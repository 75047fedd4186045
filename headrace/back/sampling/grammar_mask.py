"""Grammar masks: what may follow, a bit per token id, made by the core while the step computes.

Unlike the other features, a row has a mask in some steps only (not while it reasons), and it is new
each time. So the rows are told with the masks, and no row keeps anything. K masked rows, V width of
the logits.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import FeatureRows
from headrace.base.wire.grammar import unpack_masks
from headrace.base.wire.step import RowStart


class GrammarMask:
    """Sets every logit to -Inf that the row's grammar does not allow."""

    def __init__(self, *, max_rows: int, width: int, device: torch.device) -> None:
        self._width = width
        self._device = device
        self._masked = np.zeros(max_rows, np.bool_)
        self._place = np.zeros(max_rows, np.int64)
        self._masks = np.zeros((0, 0), np.int32)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def take(self, payload: memoryview) -> np.ndarray:
        """Takes over the masks of a step; whether each row has one, bool [max_rows]."""
        rows, self._masks = unpack_masks(payload)
        self._masked[:] = False
        self._masked[rows] = True
        self._place[rows] = np.arange(len(rows))
        return self._masked

    def start(self, start: RowStart) -> None:
        """Nothing is kept."""

    def end(self, row: int) -> None:
        """Nothing is kept."""

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Masks what is not allowed; ids beyond the mask are not."""
        packed = ~self._masks[self._place[feature_rows.rows]].view(np.uint8)
        width = min(self._width, packed.shape[1] * 8)
        if self._device.type == "cpu":
            bits = np.unpackbits(packed, axis=1, count=width, bitorder="little")
            forbidden_KV = torch.from_numpy(bits).view(torch.bool)
        else:
            sent_KB = to_device(packed, self._device)
            bits_KBS = (sent_KB[:, :, None] >> self._shifts) & 1
            forbidden_KV = bits_KBS.view(len(packed), -1)[:, :width].bool()
        logits_KV[:, :width].masked_fill_(forbidden_KV, -torch.inf)
        logits_KV[:, width:] = -torch.inf

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""
