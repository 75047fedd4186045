"""Repetition, presence and frequency penalties (ENG-26).

K rows, V vocabulary, S slots, W = ceil(V / 32) words. A row that uses a penalty holds a slot: a packed mask of the
tokens of its prompt and the counts of its output tokens. Slots are few (rows without penalties have none) and are
written whole when a row takes one, so that nothing of an earlier owner remains (REG-030).
"""

from __future__ import annotations

import numpy as np
import torch

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
        self._prompt_SW = torch.zeros((0, -(-width // 32)), dtype=torch.int32, device=device)
        self._count_SV = torch.zeros((0, width), dtype=torch.int32, device=device)

    def start(self, start: RowStart) -> None:
        """Fills a slot from the row's tokens: the prompt, and outputs if it resumes after a preemption."""
        s, slot = start.sampling, self._take_slot()
        self._slot[start.row] = slot
        numbers = np.array([s.repetition_penalty, s.presence_penalty, s.frequency_penalty])
        self._numbers[start.row] = numbers.clip(-_LARGEST, _LARGEST)
        seen = np.zeros(self._prompt_SW.shape[1] * 32, np.bool_)
        seen[start.tokens[: start.num_prompt]] = True
        words = np.packbits(seen, bitorder="little").view("<i4")
        counts = np.bincount(start.tokens[start.num_prompt :], minlength=self._width)
        self._prompt_SW[slot] = torch.from_numpy(words).to(self._device)
        self._count_SV[slot] = torch.from_numpy(counts.astype(np.int32)).to(self._device)

    def end(self, row: int) -> None:
        """Gives the slot back."""
        self._free.append(int(self._slot[row]))
        self._slot[row] = -1

    def apply(self, logits_KV: torch.Tensor, picked: Picked) -> None:
        """Rewrites the logits."""
        slot_K = torch.from_numpy(self._slot[picked.rows]).to(self._device)
        numbers = torch.from_numpy(self._numbers[picked.rows]).to(self._device)
        repetition_K1, presence_K1, frequency_K1 = numbers.split(1, dim=1)
        count_KV = self._count_SV.index_select(0, slot_K)
        seen_KV = self._unpack(self._prompt_SW.index_select(0, slot_K)) | (count_KV > 0)
        less_KV = torch.where(logits_KV > 0, logits_KV / repetition_K1, logits_KV * repetition_K1)
        logits_KV.copy_(torch.where(seen_KV, less_KV, logits_KV))
        logits_KV.sub_(count_KV * frequency_K1).sub_((count_KV > 0) * presence_K1)

    def sampled(self, token_K: torch.Tensor, picked: Picked) -> None:
        """Counts the sampled tokens."""
        slot_K = torch.from_numpy(self._slot[picked.rows]).to(self._device)
        at_K = slot_K * self._width + token_K
        self._count_SV.view(-1).index_add_(0, at_K, torch.ones_like(at_K, dtype=torch.int32))

    def _unpack(self, words_KW: torch.Tensor) -> torch.Tensor:
        bit = torch.arange(32, dtype=torch.int32, device=self._device)
        bits = (words_KW[:, :, None] >> bit) & 1
        return bits.flatten(1)[:, : self._width].to(torch.bool)

    def _take_slot(self) -> int:
        if not self._free:
            have = self._count_SV.shape[0]
            more = max(1, have)
            self._prompt_SW = _longer(self._prompt_SW, more)
            self._count_SV = _longer(self._count_SV, more)
            self._free = list(range(have, have + more))[::-1]
        return self._free.pop()


_LARGEST = 1e30
"""Numbers are held within single precision."""


def _longer(table: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([table, table.new_zeros((rows, table.shape[1]))])
