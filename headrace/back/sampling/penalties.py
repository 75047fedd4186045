"""Repetition, presence and frequency penalties.

K rows, V vocabulary, S slots, L tokens of the longest row. A row that uses a penalty holds a slot:
the counts of its output tokens, a mark at those of its prompt, and its three numbers. Slots are few
(rows without penalties have none) and are written whole when a row takes one, so that nothing of an
earlier owner remains. Slot 0 is nobody's: its numbers change nothing, whatever it counts. Only the
logits of tokens that a row has seen are touched. A device finds the slots of rows itself: penalties
are part of the step there (in_step.py) and take no word from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.penalties.op import OP, PROMPT, PenaltiesProblem
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import FeatureRows
from headrace.base.wire.step import RowStart

FEWEST = 8
"""Slots made at first: with each doubling from there on, steps with penalties are recorded anew."""


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """Of the rows of a step: slot int64 [K], where it begins in the table of counts, and ones int32
    [K]."""

    rows: bytes
    slot_K: torch.Tensor
    begin_K: torch.Tensor
    one_K: torch.Tensor


class Penalties:
    """seen = in the prompt or the output; count = how often in the output.

    1. repetition: a seen token's logit is divided by the penalty if positive, else multiplied by it
    (Keskar et al.
       2019, "CTRL", section 4.1, with the sign rule of transformers)
    2. minus frequency * count, minus presence if count > 0 (the OpenAI API's definition)
    """

    def __init__(self, *, max_rows: int, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self._penalise = OP.choose(PenaltiesProblem(device=device.type)).bind()
        self._slot = np.zeros(max_rows, np.int64)
        self._free: list[int] = []
        self._numbers_S3 = torch.tensor([[1.0, 0.0, 0.0]], device=device)
        self._count_SV = torch.zeros((1, width), dtype=torch.int32, device=device)
        self._slot_M = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._last: _Slots | None = None

    @property
    def num_slots(self) -> int:
        """Slots there are; with their number the tables move."""
        return self._count_SV.shape[0]

    def start(self, start: RowStart) -> None:
        """Counts the row's outputs: there are some if it resumes after a preemption."""
        s, slot = start.sampling, int(self._slot[start.row]) or self._take_slot()
        self._slot[start.row], self._last = slot, None
        self._slot_M[start.row].fill_(slot)
        numbers = np.array([s.repetition_penalty, s.presence_penalty, s.frequency_penalty])
        numbers = numbers.clip(-_LARGEST, _LARGEST).astype(np.float32)
        counts = np.bincount(start.tokens[start.num_prompt :], minlength=self._width)
        counts[start.tokens[: start.num_prompt]] |= PROMPT
        self._numbers_S3[slot] = to_device(numbers, self._device)
        self._count_SV[slot] = to_device(counts.astype(np.int32), self._device)

    def end(self, row: int) -> None:
        """Gives the slot back."""
        if self._slot[row]:  # else the device had no memory for the row's start
            self._free.append(int(self._slot[row]))
        self._slot[row], self._last = 0, None
        self._slot_M[row].zero_()

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Rewrites the logits of the tokens seen."""
        slot_K = self._slots(feature_rows.rows).slot_K
        self._penalise(
            logits_KV, self._count_SV, self._numbers_S3, slot_K, lambda: self._seen(feature_rows)
        )

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Counts the sampled tokens."""
        slots = self._slots(feature_rows.rows)
        self._count_SV.view(-1).index_add_(0, slots.begin_K + token_K, slots.one_K)

    def slots_of(self, row_R: torch.Tensor) -> torch.Tensor:
        """The slot of each row, on the device; 0 for rows that use no penalty, and for the one
        after the last."""
        return self._slot_M.index_select(0, row_R)

    def penalise(self, logits_RV: torch.Tensor, slot_R: torch.Tensor) -> None:
        """Rewrites the logits of the tokens seen, by slot."""

        def seen() -> torch.Tensor:
            return torch.arange(self._width, device=self._device).expand(len(slot_R), -1)

        self._penalise(logits_RV, self._count_SV, self._numbers_S3, slot_R, seen)

    def count(self, token_R: torch.Tensor, slot_R: torch.Tensor, times_R: torch.Tensor) -> None:
        """Counts tokens, by slot; times int32: 0 for a token that nobody gets."""
        at_R = torch.add(token_R, slot_R, alpha=self._width)
        self._count_SV.view(-1).index_add_(0, at_R, times_R)

    def _slots(self, rows: np.ndarray) -> _Slots:
        """Kept while the same rows come step after step."""
        asked = rows.tobytes()
        if self._last is None or self._last.rows != asked:
            slot_K = to_device(self._slot[rows], self._device)
            one_K = torch.ones_like(slot_K, dtype=torch.int32)
            begin_K = slot_K * self._width
            self._last = _Slots(rows=asked, slot_K=slot_K, begin_K=begin_K, one_K=one_K)
        return self._last

    def _seen(self, feature_rows: FeatureRows) -> torch.Tensor:
        """The tokens of each row, int64 [K, L]; a shorter row's first token fills it up."""
        row_K = to_device(feature_rows.rows, self._device)
        length_K1 = to_device(feature_rows.positions, self._device)[:, None]
        longest = int(feature_rows.positions.max())
        seen_KL = feature_rows.tokens[:, :longest].index_select(0, row_K).to(torch.int64)
        place_L = torch.arange(longest, device=self._device)
        return torch.where(place_L < length_K1, seen_KL, seen_KL[:, :1])

    def _take_slot(self) -> int:
        if not self._free:
            have = self.num_slots
            more = max(FEWEST - have, have)
            self._count_SV, self._numbers_S3 = (
                torch.cat([table, table.new_zeros((more, table.shape[1]))])
                for table in (self._count_SV, self._numbers_S3)
            )
            self._free = list(range(have, have + more))[::-1]
        return self._free.pop()


_LARGEST = 1e30
"""Numbers are held within single precision."""
