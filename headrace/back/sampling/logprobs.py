"""Log-probabilities of tokens and their alternatives, from the model's own distribution: before any
processing.

M positions, V vocabulary, A alternatives. Alternatives are the most likely tokens in falling order,
of equals the lowest id first, whatever the device's selection does (kernels/token_scores).

Log-probabilities of prompt tokens are made chunk by chunk as the prompt is computed. The logits at
position p score the token at p + 1. A chunk of a prompt scores the tokens that follow its own, so
that the pieces join without gap or overlap whatever the split; position 0 has no score. A prompt
whose KV was taken from the prefix cache has no logits to score: the core computes such prompts
afresh. A request that resumes after a preemption with outputs has been scored in full before and is
not scored again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.back.kernels.token_scores.op import MOST, ScoreTable, TokenScoresProblem, top_ids
from headrace.back.kernels.token_scores.op import OP as TOKEN_SCORES
from headrace.back.kernels.upload import to_device, to_host
from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.base.wire.request import PromptLogprobs
from headrace.base.wire.step import RowLogprobs, RowStart


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


LARGEST_MASK = 4096
"""Tokens of a sampling mask: whole vocabularies, token by token, would fill a reader's memory."""
ARGMAX = np.zeros(0, bool)
"""The mask of a greedy row: its token alone."""


@dataclass(frozen=True, kw_only=True)
class SampledLogprobs:
    """What M of a step's N sampled rows are told of their tokens. index [M] into the N; kept [M]:
    columns that each row asked for; `named`: the scores of the ids that row m named. at [M]: where
    they are in scores of more rows, which another step overwrites later; None: the scores are these
    rows' own. `masks`: m -> which tokens row m was drawn among, bool [V], or ARGMAX."""

    index: np.ndarray
    kept: list[int]
    scores: Scores
    named: Mapping[int, Scores]
    at: np.ndarray | None = None
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)

    def errors(self) -> dict[int, HeadraceError]:
        """Index into the N -> why what its row asked for is not told, once the step's event has
        passed."""
        counts = {m: int(np.count_nonzero(mask)) for m, mask in self.masks.items()}
        return {
            int(self.index[m]): InvalidRequest(
                f"sampling_mask: a token was drawn among {count}; at most {LARGEST_MASK} are told: a "
                "smaller top_k, top_p or a greater min_p leaves fewer",
                field="sampling_mask",
            )
            for m, count in counts.items()
            if count > LARGEST_MASK
        }

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
            mask = self.masks.get(m)
            among = None if mask is None else np.flatnonzero(mask).astype(np.int32)
            if mask is ARGMAX:
                among = ids[m, :1]
            yield RowLogprobs(index, row_ids, row_values, ranks[m], drawn_among=among)


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


PROMPT_CHUNK = 1 << 22
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
        self._step = max(1, PROMPT_CHUNK // logits_width)
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
