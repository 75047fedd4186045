"""Repetition, presence and frequency penalties (ENG-26).

K rows, V vocabulary, S slots, L tokens of the longest row. A row that uses a penalty holds a slot: the counts of its
output tokens. Slots are few (rows without penalties have none) and are written whole when a row takes one, so that
nothing of an earlier owner remains (REG-030). Only the logits of tokens that a row has seen are touched: a step costs
its context, not the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import Picked
from headrace.base.wire.step import RowStart


class Penalties:
    """seen = in the prompt or the output; count = how often in the output.

    1. repetition: a seen token's logit is divided by the penalty if positive, else multiplied by it (Keskar et al.
       2019, "CTRL", section 4.1, with the sign rule of transformers)
    2. minus frequency * count, minus presence if count > 0 (the OpenAI API's definition)
    """

    def __init__(self, *, max_rows: int, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self._slot = np.full(max_rows, -1, np.int64)
        self._free: list[int] = []
        self._numbers = np.zeros((max_rows, 3), np.float32)
        self._count_SV = torch.zeros((0, width), dtype=torch.int32, device=device)

    def start(self, start: RowStart) -> None:
        """Counts the row's outputs: there are some if it resumes after a preemption."""
        s, slot = start.sampling, self._take_slot()
        self._slot[start.row] = slot
        numbers = np.array([s.repetition_penalty, s.presence_penalty, s.frequency_penalty])
        self._numbers[start.row] = numbers.clip(-_LARGEST, _LARGEST)
        counts = np.bincount(start.tokens[start.num_prompt :], minlength=self._width)
        self._count_SV[slot] = to_device(counts.astype(np.int32), self._device)

    def end(self, row: int) -> None:
        """Gives the slot back."""
        self._free.append(int(self._slot[row]))
        self._slot[row] = -1

    def apply(self, logits_KV: torch.Tensor, picked: Picked) -> None:
        """Rewrites the logits of the tokens seen. A token seen twice is written twice, with the same value."""
        seen_KL = self._seen(picked)
        slot_K1 = to_device(self._slot[picked.rows], self._device)[:, None]
        numbers = to_device(self._numbers[picked.rows], self._device)
        repetition_K1, presence_K1, frequency_K1 = numbers.split(1, dim=1)
        count_KL = self._count_SV.view(-1)[slot_K1 * self._width + seen_KL]
        logit_KL = logits_KV.gather(1, seen_KL)
        less_KL = torch.where(logit_KL > 0, logit_KL / repetition_K1, logit_KL * repetition_K1)
        less_KL.sub_(count_KL * frequency_K1).sub_((count_KL > 0) * presence_K1)
        logits_KV.scatter_(1, seen_KL, less_KL)

    def sampled(self, token_K: torch.Tensor, picked: Picked) -> None:
        """Counts the sampled tokens."""
        slot_K = to_device(self._slot[picked.rows], self._device)
        at_K = slot_K * self._width + token_K
        self._count_SV.view(-1).index_add_(0, at_K, torch.ones_like(at_K, dtype=torch.int32))

    def _seen(self, picked: Picked) -> torch.Tensor:
        """The tokens of each row, int64 [K, L]; a shorter row's first token fills it up."""
        row_K = to_device(picked.rows, self._device)
        length_K1 = to_device(picked.positions, self._device)[:, None]
        longest = int(picked.positions.max())
        seen_KL = picked.tokens[:, :longest].index_select(0, row_K).to(torch.int64)
        place_L = torch.arange(longest, device=self._device)
        return torch.where(place_L < length_K1, seen_KL, seen_KL[:, :1])

    def _take_slot(self) -> int:
        if not self._free:
            have = self._count_SV.shape[0]
            more = max(1, have)
            self._count_SV = torch.cat(
                [self._count_SV, self._count_SV.new_zeros((more, self._width))]
            )
            self._free = list(range(have, have + more))[::-1]
        return self._free.pop()


_LARGEST = 1e30
"""Numbers are held within single precision."""
