"""The adapter slots of the runner's rows, and of a step's tokens where its kernels read them; and
the same of the directions that rows are steered by (layers/row_directions.py).

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
from headrace.back.layers.row_directions import RowDirections
from headrace.base.wire.step import RowStart

RING = 8
"""Buffers on the host: at least as many as steps may be in flight."""


class TokenWords:
    """A number for each token and each row of a step, where its kernels read them. `max_tokens`:
    query tokens of a step at most."""

    def __init__(
        self, dtype: torch.dtype, *, max_rows: int, max_tokens: int, device: torch.device
    ) -> None:
        size = max_tokens + max_rows + 1
        self._words = torch.zeros(size, dtype=dtype, device=device)
        self.token_T, self.row_R = self._words.split((max_tokens, max_rows + 1))
        self._split = max_tokens
        self._copies: torch.Tensor | None = None
        if device.type == "cpu":  # the step before has run when the next one's are written
            self._host = [self._words.numpy()] * RING
        else:
            pinned = device.type == "cuda"
            self._copies = torch.zeros((RING, size), dtype=dtype, pin_memory=pinned)
            self._host = list(self._copies.numpy())
        self._turn = 0

    def send(self, word_R: np.ndarray, start_R1: np.ndarray, *, tokens: int, rows: int) -> None:
        """Puts those of a step's rows and their tokens, padded with 0 to its bucket. `start_R1`:
        the first query token of each row, and their number."""
        self._turn = (self._turn + 1) % RING
        words, at = self._host[self._turn], self._split
        word_T = np.repeat(word_R, np.diff(start_R1))
        words[: word_T.size], words[word_T.size : tokens] = word_T, 0
        words[at : at + word_R.size], words[at + word_R.size : at + rows] = word_R, 0
        if self._copies is not None:
            copy = self._copies[self._turn]
            self.token_T[:tokens].copy_(copy[:tokens], non_blocking=True)
            self.row_R[:rows].copy_(copy[at : at + rows], non_blocking=True)


class RowSlots:
    """Of adapters int32, 0: none; of directions int64, where the model takes any (`steers`)."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        directions: RowDirections | None = None,
    ) -> None:
        sizes = {"max_rows": max_rows, "max_tokens": max_tokens, "device": device}
        self._slot_M = np.zeros(max_rows, np.int32)
        self._slots = TokenWords(torch.int32, **sizes)
        self._directions = directions
        self._steered_M = np.zeros(max_rows, np.int64)
        self._steered = None if directions is None else TokenWords(torch.int64, **sizes)

    def begin(self, starts: Sequence[RowStart]) -> None:
        """Requests take rows."""
        for start in starts:
            self._slot_M[start.row] = start.adapter_slot
            if self._directions is not None:
                wanted = start.sampling.control_vectors
                self._steered_M[start.row] = self._directions.take(start.row, wanted)

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """The slots int32 [R] of a step's rows, and int64 [R] of their directions; None if none has
        an adapter or a direction."""
        slot_R, steered_R = self._slot_M[rows], self._steered_M[rows]
        return (slot_R, steered_R) if any(slot_R.tolist()) or any(steered_R.tolist()) else None

    def send(
        self,
        slots: tuple[np.ndarray, np.ndarray],
        start_R1: np.ndarray,
        *,
        tokens: int,
        rows: int,
    ) -> None:
        """Puts what `of` has given where a step of a bucket reads it: see TokenWords."""
        self._slots.send(slots[0], start_R1, tokens=tokens, rows=rows)
        if self._steered is not None:
            self._steered.send(slots[1], start_R1, tokens=tokens, rows=rows)

    def on(self, batch: Batch) -> Batch:
        """A bucket's batch that reads what `send` has put there."""
        after, rows = batch.last_token_batch, batch.logits_at_N.shape[0]
        tokens, steered = batch.token_ids_T.shape[0], self._steered
        if after is not None:
            steered_R = None if steered is None else steered.row_R[:rows]
            after = replace(after, slot_T=self._slots.row_R[:rows], steered_T=steered_R)
        steered_T = None if steered is None else steered.token_T[:tokens]
        slot_T = self._slots.token_T[:tokens]
        return replace(batch, slot_T=slot_T, steered_T=steered_T, last_token_batch=after)


def with_slots(batch: Batch, slots: tuple[np.ndarray, np.ndarray], start_R1: np.ndarray) -> Batch:
    """An exact step's batch, with those of its tokens beside them on the device."""
    count_R, device = np.diff(start_R1), batch.positions_T.device
    slot_T, steered_T = (to_device(np.repeat(one, count_R), device) for one in slots)
    return replace(batch, slot_T=slot_T, steered_T=steered_T)
