"""The numbers of all rows on the device, as op `sample` reads them, so that a step with random rows
needs no word from the host: they are written once, before the first step after the row has
started."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.op import decisions
from headrace.back.kernels.sample.op import NUMBERS, OP, Argmax, SampleProblem, numbers
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import RowNumbers, Use


class DeviceRows:
    """Op `sample` over the rows' table. The row after the last is nobody's, and greedy."""

    def __init__(self, host: RowNumbers, device: torch.device) -> None:
        choice = OP.choose(SampleProblem(device=device.type))
        self.decisions = decisions((choice,))
        self._sample = choice.bind()
        self._host = host
        self._device = device
        self._rows = torch.zeros((len(host.use) + 1, NUMBERS), dtype=torch.int64, device=device)
        self._stale: set[int] = set()

    def start(self, row: int) -> None:
        """The row's numbers have changed."""
        self._stale.add(row)

    def refresh(self) -> None:
        """Writes the numbers that have changed, where the device's work stands."""
        if not self._stale:
            return
        rows, host = np.array(sorted(self._stale)), self._host
        random = (host.use[rows] & Use.RANDOM) != 0
        candidates = numbers(
            heat=np.where(random, host.temperature[rows], 0.0),
            seed=host.seed[rows],
            top_k=host.top_k[rows],
            top_p=host.top_p[rows],
            min_p=host.min_p[rows],
        )
        self._rows.index_copy_(
            0, to_device(rows, self._device), to_device(candidates, self._device)
        )
        self._stale.clear()  # not before: the device may have had no memory for the copies

    def sample_random(
        self,
        logits_KV: torch.Tensor,
        argmax: Argmax,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
    ) -> Argmax:
        """See the op; all tensors are on the device."""
        return self._sample(logits_KV, argmax, self._rows, row_K, position_K)
