"""Log-probabilities of tokens and their alternatives, from the model's own distribution: before any
processing.

M positions, V vocabulary, A alternatives. Alternatives are the most likely tokens in falling order,
of equals the lowest id first, whatever the device's selection does (kernels/token_scores).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.token_scores.op import MOST, ScoreTable, TokenScoresProblem, top_ids
from headrace.back.kernels.token_scores.op import OP as TOKEN_SCORES
from headrace.back.kernels.upload import to_device, to_host
from headrace.base.wire.step import RowLogprobs


@dataclass(frozen=True, kw_only=True)
class Scores:
    """ids int32 [M, 1+A+named], values float32 of the same shape, ranks int32 [M], on the host: to
    be read once the step's event has passed (kernels/upload.py: to_host)."""

    ids: np.ndarray
    values: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, words: np.ndarray) -> Scores:
        """Views of a ScoreTable's data on the host."""
        columns = words.shape[1] // 2 - 1
        values = words[:, columns : 2 * columns].view(np.float32)
        return cls(ids=words[:, :columns], values=values, ranks=words[:, -2])

    def take(self, at: np.ndarray) -> Scores:
        """A copy of some positions."""
        return Scores(ids=self.ids[at], values=self.values[at], ranks=self.ranks[at])


@dataclass(frozen=True, kw_only=True)
class SampledLogprobs:
    """What M of a step's N sampled rows are told of their tokens. index [M] into the N; kept [M]:
    columns that each row asked for; `named`: the scores of the ids that row m named. at [M]: where
    they are in scores of more rows, which another step overwrites later; None: the scores are these
    rows' own."""

    index: np.ndarray
    kept: list[int]
    scores: Scores
    named: Mapping[int, Scores]
    at: np.ndarray | None = None

    def rows(self) -> Iterator[RowLogprobs]:
        """Row by row, once the step's event has passed."""
        scores = self.scores if self.at is None else self.scores.take(self.at)
        ids, values, ranks = scores.ids, scores.values, scores.ranks.tolist()
        for m, (index, count) in enumerate(zip(self.index.tolist(), self.kept, strict=True)):
            row_ids, row_values = ids[m, :count], values[m, :count]
            if m in self.named:
                more = self.named[m]
                row_ids = np.concatenate([row_ids, more.ids[0, 1:]])
                row_values = np.concatenate([row_values, more.values[0, 1:]])
            yield RowLogprobs(index, row_ids, row_values, ranks[m])


def score(
    logits_MV: torch.Tensor,
    token_M: torch.Tensor,
    *,
    alternatives: int,
    named: Sequence[int] = (),
) -> Scores:
    """Scores the tokens of M positions.

    Column 0 is the token itself, then the alternatives (-1: the whole vocabulary; the token may be
    among them), then the named ids. The rank counts from 1: tokens with a greater logit, plus one.
    Up to MOST alternatives and no named ids are one launch and one copy.
    """
    device, width = logits_MV.device, logits_MV.shape[1]
    count = width if alternatives < 0 else min(alternatives, width)
    logprobs = ScoreTable.empty(len(token_M), 1 + (count if count <= MOST else 0), device)
    token_scores = TOKEN_SCORES.choose(TokenScoresProblem(device=device.type)).bind()
    token_scores(logits_MV, token_M, logprobs)
    if count <= MOST and not named:
        return Scores.of(to_host(logprobs.data).numpy())
    more = [top_ids(logits_MV, count)] if count > MOST else []
    more.append(to_device(np.array(named, np.int64), device).expand(len(token_M), -1))
    more_MN = torch.cat(more, dim=1)
    values_MN = logits_MV.gather(1, more_MN) - logprobs.log_sum_exp
    return Scores(
        ids=to_host(torch.cat([logprobs.ids, more_MN.to(torch.int32)], dim=1)).numpy(),
        values=to_host(torch.cat([logprobs.values, values_MN], dim=1)).numpy(),
        ranks=to_host(logprobs.ranks).numpy(),
    )
