"""Rows that are told of the distribution they are drawn from, behind penalties, biases, masks,
temperature and truncation: its log-probabilities, or which tokens it leaves."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device, to_host
from headrace.back.sampling.features import FeatureRows, RowNumbers, Use, rows_at
from headrace.back.sampling.logprobs import ARGMAX
from headrace.back.sampling.random_rows import truncated
from headrace.base.wire.request import RowSampling


class ProcessedRows(dict[int, RowSampling]):
    """The rows that asked for it, until they are given back."""

    def start(self, row: int, sampling: RowSampling) -> None:
        """A request takes a row and asks for log-probabilities."""
        if sampling.logprobs_mode == "processed" or sampling.sampling_mask:
            self[row] = sampling

    def see(
        self,
        scored_MV: torch.Tensor,
        processed_MV: torch.Tensor,
        numbers: RowNumbers,
        feature_rows: FeatureRows,
    ) -> dict[int, np.ndarray]:
        """Takes the M scored rows' logits as they are and processed, before temperature: what is to
        be scored is replaced. Of rows that ask for it: m -> bool [V], which tokens it is drawn
        among, on its way to the host, or ARGMAX."""
        rows = feature_rows.rows.tolist()
        at = np.array([m for m, row in enumerate(rows) if row in self], dtype=np.intp)
        if not at.size:
            return {}
        asked = [self[rows[m]] for m in at]
        values = truncated(rows_at(processed_MV, at), numbers, feature_rows.take(at))
        scored = np.flatnonzero([one.logprobs_mode == "processed" for one in asked])
        if scored.size:
            replaced = to_device(at[scored], scored_MV.device)
            scored_MV.index_copy_(0, replaced, rows_at(values, scored))
        random = numbers.use[feature_rows.rows] & Use.RANDOM
        return {
            int(m): to_host(values[k] > -torch.inf).numpy() if random[m] else ARGMAX
            for k, (m, one) in enumerate(zip(at, asked, strict=True))
            if one.sampling_mask
        }
