"""What a step does for its rows in its own graph, on devices that record steps: penalties, the draw, log-probabilities.

Everything it reads of the rows lies on the device, found by row: the host says only which of these the step needs
(`Drawing`), and what comes out is told in one table. Rows that ask for less are beside the others: nobody's slot of
penalties, the pick for greedy rows, scores that nobody reads.

R rows of a step and padding, V vocabulary, W words told of a row: the token, the bits of the model's greatest logit,
the bits of `left` (0, or NaN if the logit chosen after processing is not finite), then the scores (op token_scores).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.greedy.op import Greedy
from headrace.back.kernels.token_scores.op import MOST, ScoreTable, TokenScores
from headrace.back.sampling.drawn_rows import DrawnRows
from headrace.back.sampling.logprobs import Scores
from headrace.back.sampling.penalties import Penalties

ALTERNATIVES = (5, MOST)
"""Alternatives that steps tell: each number is a recording of its own."""
SCORES = 3
"""Where in a told row the scores begin."""
MOST_WORDS = SCORES + ScoreTable.words(1 + MOST)

Picks = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a step does beyond greedy picks, and so which recording it takes. penalties: slots of the tables that they
    are read from, which move when they grow; 0: none. alternatives: of each row's log-probabilities; None: none."""

    penalties: int = 0
    alternatives: int | None = None

    @property
    def words(self) -> int:
        """W; 0 if the tokens and the picks' values say all."""
        if self.alternatives is not None:
            return SCORES + ScoreTable.words(1 + self.alternatives)
        return SCORES if self.penalties else 0

    def __str__(self) -> str:
        parts = ["drawn"]
        if self.penalties:
            parts.append("penalised")
        if self.alternatives is not None:
            parts.append(f"{self.alternatives} log-probabilities")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class AskedRows:
    """Of the R rows, on the device, int32: row; position of the token to be sampled; sample: 1 where it is, else 0."""

    row_R: torch.Tensor
    position_R: torch.Tensor
    sample_R: torch.Tensor


StepSampler = Callable[
    [Drawing, torch.Tensor, Picks, AskedRows], tuple[torch.Tensor, torch.Tensor | None]
]
"""(drawing, logits float32 [R, V], which are overwritten, the picks in them, rows) -> tokens int64 [R], and what is
told int32 [R, W], if W."""


class StepDraw:
    """A `StepSampler` over the sampler's state."""

    def __init__(
        self,
        *,
        drawn: DrawnRows,
        penalties: Penalties,
        greedy: Greedy,
        token_scores: TokenScores,
    ) -> None:
        self._drawn = drawn
        self._penalties = penalties
        self._greedy = greedy
        self._token_scores = token_scores

    def __call__(
        self, drawing: Drawing, logits_RV: torch.Tensor, picks: Picks, asked: AskedRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See StepSampler."""
        raw_RV, chosen, slots = logits_RV, picks, None
        if drawing.penalties:
            if drawing.alternatives is not None:
                raw_RV = logits_RV.clone()
            slots = self._penalties.slots_of(asked.row_R)
            self._penalties.penalise(logits_RV, slots)
            chosen = self._greedy(logits_RV)
        token_R, z_R = self._drawn.draw(logits_RV, chosen, asked.row_R, asked.position_R)
        if not drawing.words:
            return token_R, None
        left_R = (z_R - z_R).to(torch.float32)
        columns = [token_R.to(torch.int32), *(v.view(torch.int32) for v in (picks[1], left_R))]
        told = [column[:, None] for column in columns]
        if drawing.alternatives is not None:
            scores = ScoreTable.empty(len(token_R), 1 + drawing.alternatives, token_R.device)
            self._token_scores(raw_RV, token_R, scores)
            told.append(scores.data)
        told_RW = torch.cat(told, dim=1)
        if slots is not None:  # last, so that a step that found no memory may be tried again
            self._penalties.count(token_R, slots, asked.sample_R)
        return token_R, told_RW


@dataclass(frozen=True, kw_only=True)
class StepTold:
    """What a step has told, on the host, to be read behind `Steps.moment`; index by row of the step. tokens int32,
    best, left float32; left None: nothing was processed; scores None: there are none."""

    tokens: np.ndarray
    best: np.ndarray
    left: np.ndarray | None = None
    scores: Scores | None = None

    @classmethod
    def of(cls, told: np.ndarray, words: int) -> StepTold:
        """Views of what lies in a slot: rows of W words from its beginning on, or, if W is 0, tokens and picks' values,
        [2, M]."""
        if not words:
            return cls(tokens=told[0], best=told[1].view(np.float32))
        told_RW = told[: told.size // words * words].reshape(-1, words)
        tokens, best, left = told_RW.T[:SCORES]
        scores = Scores.of(told_RW[:, SCORES:]) if words > SCORES else None
        best, left = best.view(np.float32), left.view(np.float32)
        return cls(tokens=tokens, best=best, left=left, scores=scores)
