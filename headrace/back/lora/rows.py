"""The adapter slots of the runner's rows, and of a step's tokens where its kernels read them.

Slots are known to the host with the plan: in steps of a bucket they are written, or copied, into
tensors that stay where they are, so that a recorded step with adapters reads those of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.upload import to_device
from headrace.base.wire.step import RowStart

RING = 8
"""Buffers on the host: at least as many as steps may be in flight."""


class RowSlots:
    """`max_tokens`: query tokens of a step at most."""

    def __init__(self, *, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self._slot_M = np.zeros(max_rows, np.int32)
        size = max_tokens + max_rows + 1
        self._words = torch.zeros(size, dtype=torch.int32, device=device)
        self._token_T, self._row_R = self._words.split((max_tokens, max_rows + 1))
        self._split = max_tokens
        self._copies: torch.Tensor | None = None
        if device.type == "cpu":  # the step before has run when the next one's slots are written
            self._host = [self._words.numpy()] * RING
        else:
            pinned = device.type == "cuda"
            self._copies = torch.zeros((RING, size), dtype=torch.int32, pin_memory=pinned)
            self._host = list(self._copies.numpy())
        self._turn = 0

    def begin(self, starts: Sequence[RowStart]) -> None:
        """Requests take rows."""
        for start in starts:
            self._slot_M[start.row] = start.adapter_slot

    def of(self, rows: np.ndarray) -> np.ndarray | None:
        """The slots int32 [R] of a step's rows; None if none has an adapter."""
        slot_R: np.ndarray = self._slot_M[rows]
        return slot_R if any(slot_R.tolist()) else None

    def send(self, slot_R: np.ndarray, start_R1: np.ndarray, *, tokens: int, rows: int) -> None:
        """Puts the slots of a step's tokens and rows, padded with 0 to its bucket, where it reads
        them. `start_R1`: the first query token of each row, and their number."""
        self._turn = (self._turn + 1) % RING
        words, at = self._host[self._turn], self._split
        slot_T = np.repeat(slot_R, np.diff(start_R1))
        words[: slot_T.size], words[slot_T.size : tokens] = slot_T, 0
        words[at : at + slot_R.size], words[at + slot_R.size : at + rows] = slot_R, 0
        if self._copies is not None:
            copy = self._copies[self._turn]
            self._token_T[:tokens].copy_(copy[:tokens], non_blocking=True)
            self._row_R[:rows].copy_(copy[at : at + rows], non_blocking=True)

    def on(self, batch: Batch) -> Batch:
        """A bucket's batch that reads what `send` has put there."""
        after, rows = batch.last_token_batch, batch.logits_at_N.shape[0]
        if after is not None:
            after = replace(after, slot_T=self._row_R[:rows])
        slot_T = self._token_T[: batch.token_ids_T.shape[0]]
        return replace(batch, slot_T=slot_T, last_token_batch=after)


def slots_of(slot_R: np.ndarray, start_R1: np.ndarray, batch: Batch) -> torch.Tensor:
    """The slots int32 [T] of an exact step's tokens, beside them on the device."""
    return to_device(np.repeat(slot_R, np.diff(start_R1)), batch.positions_T.device)
