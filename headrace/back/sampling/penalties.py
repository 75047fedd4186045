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
        """Rewrites the logits of the tokens seen; a row that stands here several times has drafts,
        which lie in its tokens before the later places and count there."""
        slot_K = self._slots(feature_rows.rows).slot_K
        drafts_KD = None
        if _has_drafts(feature_rows.rows):
            rows, positions = feature_rows.rows, feature_rows.positions
            begins = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
            offset = np.arange(len(rows)) - np.repeat(begins, np.diff(np.r_[begins, len(rows)]))
            row_K, position_K, offset_K = (
                to_device(one, self._device) for one in (rows, positions, offset)
            )
            most = int(offset.max())
            drafts_KD = drafts_before(feature_rows.tokens, row_K, position_K, offset_K, most)
        self._penalise(
            logits_KV,
            self._count_SV,
            self._numbers_S3,
            slot_K,
            lambda: self._seen(feature_rows),
            drafts_KD,
        )

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Counts the sampled tokens, behind drafts those that stand."""
        slots = self._slots(feature_rows.rows)
        times_K = slots.one_K
        if _has_drafts(feature_rows.rows):
            times_K = to_device(_standing(token_K, feature_rows), self._device)
        self._count_SV.view(-1).index_add_(0, slots.begin_K + token_K, times_K)

    def slots_of(self, row_R: torch.Tensor) -> torch.Tensor:
        """The slot of each row, on the device; 0 for rows that use no penalty, and for the one
        after the last."""
        return self._slot_M.index_select(0, row_R)

    def penalise(
        self, logits_RV: torch.Tensor, slot_R: torch.Tensor, drafts_RD: torch.Tensor | None = None
    ) -> None:
        """Rewrites the logits of the tokens seen, by slot; `drafts`: see the op."""

        def seen() -> torch.Tensor:
            return torch.arange(self._width, device=self._device).expand(len(slot_R), -1)

        self._penalise(logits_RV, self._count_SV, self._numbers_S3, slot_R, seen, drafts_RD)

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


def drafts_before(
    tokens_MC: torch.Tensor,
    row_K: torch.Tensor,
    position_K: torch.Tensor,
    offset_K: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """The drafts before the token at a position that is so many places behind its row's first, all
    on the device: int64 [K, most], first to last; -1 from the token itself on."""
    place_D = torch.arange(most, device=tokens_MC.device)
    first_K = position_K.long() - offset_K
    columns = tokens_MC.shape[1]
    column_KD = (first_K[:, None] + place_D).clamp_(min=0, max=columns - 1)
    draft_KD = tokens_MC.view(-1)[row_K.long()[:, None] * columns + column_KD].long()
    return torch.where(place_D < offset_K[:, None], draft_KD, -1)


def _has_drafts(rows: np.ndarray) -> bool:
    """Whether a row stands at several places, which follow each other."""
    return bool((rows[1:] == rows[:-1]).any())


def _standing(token_K: torch.Tensor, feature_rows: FeatureRows) -> np.ndarray:
    """int32 [K]: 1 for the first token of each row, and for those behind drafts that were all
    sampled; else 0. As op step_verify says, where every draft was proposed."""
    rows, positions = feature_rows.rows.tolist(), feature_rows.positions.tolist()
    tokens = token_K.tolist()
    stands = np.ones(len(rows), np.int32)
    for k in range(1, len(rows)):
        if rows[k] == rows[k - 1]:
            draft = int(feature_rows.tokens[rows[k], positions[k] - 1])
            stands[k] = stands[k - 1] and draft == tokens[k - 1]
    return stands


_LARGEST = 1e30
"""Numbers are held within single precision."""
