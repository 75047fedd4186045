"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed.

The logits at position p score the token at p + 1. A chunk of a prompt scores the tokens that follow
its own, so that the pieces join without gap or overlap whatever the split; position 0 has no score.
A prompt whose KV was taken from the prefix cache has no logits to score: the core computes such
prompts afresh. A request that resumes after a preemption with outputs has been scored in full
before and is not scored again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.sampling.logprobs import Scores, score
from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import PromptLogprobs
from headrace.base.wire.step import RowStart

CHUNK = 1 << 22
"""Logits held at a time (16 MiB): a prompt's logits would not fit into memory whole."""


LARGEST = 1 << 24
"""Scores of one prompt, 8 bytes each (128 MiB): more are refused before any work is done."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    prompt: np.ndarray
    alternatives: int
    named: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The scores of one chunk of a prompt from position `start` on, on their way to the host."""

    start: int
    parts: list[Scores]

    def read(self) -> PromptLogprobs:
        """As one piece, once the step's event has passed."""
        return PromptLogprobs(
            start=self.start,
            ids=np.concatenate([part.ids for part in self.parts]),
            values=np.concatenate([part.values for part in self.parts]),
            ranks=np.concatenate([part.ranks for part in self.parts]),
        )


class PromptScorer:
    """Scores the prompts of the `rows` that ask for it: what each wants, or why it is refused."""

    def __init__(self, *, logits_width: int, device: torch.device) -> None:
        self._device = device
        self._width = logits_width
        self._step = max(1, CHUNK // logits_width)
        self.rows: dict[int, _Asked | InvalidRequest] = {}

    def refusal(self, row: int) -> InvalidRequest | None:
        """Why this row's prompt is not scored: it asks for too much, and its request fails."""
        asked = self.rows.get(row)
        return asked if isinstance(asked, InvalidRequest) else None

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        s = start.sampling
        if s.prompt_logprobs is None or start.tokens.size != start.num_prompt:
            return
        alternatives = self._width if s.prompt_logprobs < 0 else s.prompt_logprobs
        columns = 1 + min(alternatives, self._width) + len(s.logprob_ids)
        if start.num_prompt * columns > LARGEST:
            self.rows[start.row] = InvalidRequest(
                f"prompt_logprobs asks for {columns} scores at each of {start.num_prompt} prompt tokens, "
                f"{start.num_prompt * columns} in all; at most {LARGEST} are made: ask for fewer alternatives",
                field="prompt_logprobs",
            )
        else:
            self.rows[start.row] = _Asked(
                prompt=start.tokens.astype(np.int64),
                alternatives=s.prompt_logprobs,
                named=s.logprob_ids,
            )

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back."""
        for row in rows.tolist():
            self.rows.pop(row, None)

    def score(
        self,
        row: int,
        hidden_QE: torch.Tensor,
        *,
        first: int,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> Scored | None:
        """Scores what a chunk of a row gives; None if the row did not ask or nothing is left of its
        prompt.

        hidden_QE: the chunk's hidden states, whose positions start at `first`.
        """
        asked = self.rows.get(row)
        if not isinstance(asked, _Asked):
            return None
        targets = asked.prompt[first + 1 : first + 1 + hidden_QE.shape[0]]
        if not targets.size:
            del self.rows[row]
            return None
        parts = []
        for start in range(0, targets.size, self._step):
            token_M = to_device(targets[start : start + self._step], self._device)
            logits_MV = logits(hidden_QE[start : start + len(token_M)])
            parts.append(
                score(logits_MV, token_M, alternatives=asked.alternatives, named=asked.named)
            )
        return Scored(start=first + 1, parts=parts)
