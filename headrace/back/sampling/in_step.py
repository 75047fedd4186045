"""What a step does for its rows in its own graph: masks and biases, and on devices that sample
there penalties, sampling, log-probabilities.

Everything it reads of the rows lies on the device, found by row: the host says only which of these
the step needs (`InStepSampling`), and what comes out is reported in one table. Rows that ask for
less are beside the others: nobody's slot of penalties, the argmax for greedy rows, scores that
nobody reads.

R rows of a step and padding, V vocabulary, W words reported of a row: the token, the bits of the
model's greatest logit, the bits of `chosen_logit` (0, or NaN if the logit chosen after processing
is not finite), then the scores (op token_scores).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, nonmember
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from headrace.back.kernels.greedy.op import Argmax, Greedy
from headrace.back.kernels.op import decisions
from headrace.back.kernels.sample.op import NUMBERS, OP, SampleProblem, numbers
from headrace.back.kernels.token_scores.op import MOST, ScoreTable, TokenScores
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import RowNumbers, Use
from headrace.back.sampling.logit_masks import RowMasks
from headrace.back.sampling.logprobs import Scores
from headrace.back.sampling.penalties import Penalties, drafts_before


class SamplingTable:
    """The rows' numbers on the device, as op `sample` reads them: `numbers_M` int64 [M+1, NUMBERS].
    The row after the last is nobody's, and greedy."""

    def __init__(self, host: RowNumbers, device: torch.device) -> None:
        self._host = host
        self._device = device
        shape = len(host.use) + 1, NUMBERS
        self.numbers_M = torch.zeros(shape, dtype=torch.int64, device=device)

    def refresh(self) -> None:
        """Writes the numbers that have changed, where the device's work stands."""
        if not self._host.changed:
            return
        rows, host = np.array(sorted(self._host.changed)), self._host
        random = (host.use[rows] & Use.RANDOM) != 0
        table = numbers(
            heat=np.where(random, host.temperature[rows], 0.0),
            seed=host.seed[rows],
            top_k=host.top_k[rows],
            top_p=host.top_p[rows],
            min_p=host.min_p[rows],
        )
        at = to_device(rows, self._device)
        self.numbers_M.index_copy_(0, at, to_device(table, self._device))
        host.changed.clear()  # not before: the device may have had no memory for the copies


class DeviceRows:
    """Op `sample` over the rows' table."""

    def __init__(self, table: SamplingTable, device: torch.device) -> None:
        choice = OP.choose(SampleProblem(device=device.type))
        self.decisions = decisions((choice,))
        self._sample = choice.bind()
        self._table = table

    def refresh(self) -> None:
        """See SamplingTable."""
        self._table.refresh()

    def sample_random(
        self,
        logits_KV: torch.Tensor,
        argmax: Argmax,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
    ) -> Argmax:
        """See the op; all tensors are on the device."""
        return self._sample(logits_KV, argmax, self._table.numbers_M, row_K, position_K)


ALTERNATIVES = (5, MOST)
"""Alternatives that steps report: each number is a recording of its own."""
SCORES = 3
"""Where in a reported row the scores begin."""
MOST_WORDS = SCORES + ScoreTable.words(1 + MOST)


@runtime_checkable
class SamplerInput(Protocol):
    """A way to choose a step's tokens, as far as the step takes part: what it leaves for the
    sampler, or does itself instead; so which recording it takes.

    head: what it computes of the hidden states. in_step: it chooses the tokens itself. reads_rows:
    as its rows ask, and beside prompts too, where the other ways leave logits. penalties: slots of
    the tables that they are read from, which move when they grow; 0: none. masks: rows have masks
    or biases. grammar: rows have masks of grammars, which come while the step computes. words: W; 0
    if the tokens and the greatest logits say all."""

    @property
    def head(self) -> HeadOutput: ...
    @property
    def in_step(self) -> bool: ...
    @property
    def reads_rows(self) -> bool: ...
    @property
    def penalties(self) -> int: ...
    @property
    def masks(self) -> bool: ...
    @property
    def grammar(self) -> bool: ...
    @property
    def words(self) -> int: ...

    def runs_with(self, sampler: StepSampler | None) -> bool:
        """Whether steps with this sampler take this way."""
        ...

    def of_drafts(self) -> SamplerInput:
        """The way of steps that verify drafts."""
        ...


class HeadOutput(StrEnum):
    """What a model's head gives, and as a `SamplerInput` no more than that: whole rows of logits,
    the argmax, or each row's best tokens (top_candidates.py)."""

    LOGITS = "logits"
    ARGMAX = "argmax"
    TOP_CANDIDATES = "top_candidates"

    reads_rows = nonmember(False)
    penalties = nonmember(0)
    masks = nonmember(False)
    grammar = nonmember(False)
    words = nonmember(0)

    def __init__(self, name: str) -> None:
        self.head = self
        self.in_step = name == "argmax"

    def runs_with(self, sampler: StepSampler | None) -> bool:
        """See SamplerInput."""
        return True

    def of_drafts(self) -> SamplerInput:
        """See SamplerInput."""
        return self


@dataclass(frozen=True, kw_only=True)
class InStepSampling:
    """What a step does beyond the argmax: see SamplerInput. alternatives: of each row's
    log-probabilities; None: none. samples: rows are sampled; else all are greedy."""

    penalties: int = 0
    alternatives: int | None = None
    masks: bool = False
    grammar: bool = False
    samples: bool = True

    @property
    def head(self) -> HeadOutput:
        """See SamplerInput."""
        return HeadOutput.LOGITS

    @property
    def in_step(self) -> bool:
        """See SamplerInput."""
        return True

    @property
    def reads_rows(self) -> bool:
        """See SamplerInput."""
        return True

    def runs_with(self, sampler: StepSampler | None) -> bool:
        """See SamplerInput."""
        return sampler is not None and self.samples == sampler.samples

    def of_drafts(self) -> SamplerInput:
        """See SamplerInput. Where steps do not sample, the rows of drafts are not known in them."""
        return self if self.samples else HeadOutput.LOGITS

    @property
    def words(self) -> int:
        """See SamplerInput."""
        if self.alternatives is not None:
            return SCORES + ScoreTable.words(1 + self.alternatives)
        return SCORES if self.penalties else 0

    def __str__(self) -> str:
        parts = ["sampled"] if self.samples else ["greedy"]
        if self.masks:
            parts.append("masked by grammars" if self.grammar else "masked")
        if self.penalties:
            parts.append("penalised")
        if self.alternatives is not None:
            parts.append(f"{self.alternatives} log-probabilities")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class AskedRows:
    """Of the R rows, on the device, int32: row; position of the token to be sampled; sample: 1
    where it is, else 0. tokens int32 [M, columns]: all rows' tokens at their positions. Of a step
    that verifies drafts each place is one of the R, and `offset` int64 [R] says the how many-th of
    its row it is, at most `most_drafts`; None: each is its row's first."""

    row_R: torch.Tensor
    position_R: torch.Tensor
    sample_R: torch.Tensor
    tokens_MC: torch.Tensor
    offset_R: torch.Tensor | None = None
    most_drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class InStepTokens:
    """What a step has sampled: token int64 [R]; max_logit float32 [R], the model's greatest logit,
    or, where only masks have changed them, the greatest behind these: -Inf if no token is left, not
    finite either if the logits have failed. words int32 [R, W]: what is reported, if W."""

    token_R: torch.Tensor
    max_logit_R: torch.Tensor
    words_RW: torch.Tensor | None = None


class StepSampler(Protocol):
    """Chooses the tokens of a step's rows. `samples`: of random rows too, as `InStepSampling`."""

    samples: bool

    def __call__(
        self, in_step: InStepSampling, logits_RV: torch.Tensor, asked: AskedRows
    ) -> InStepTokens:
        """The tokens of the rows; logits float32 [R, V], which are overwritten."""
        ...

    def count(
        self,
        in_step: InStepSampling,
        token_R: torch.Tensor,
        asked: AskedRows,
        stands_R: torch.Tensor,
    ) -> None:
        """The rows have these tokens, those where `stands` int32 is 1 and not 0: what comes after
        them is to know it. Last, so that a step that found no memory may be tried again."""
        ...


class InStepSampler:
    """A `StepSampler` over the sampler's state."""

    def __init__(
        self,
        *,
        device_rows: DeviceRows | None,
        penalties: Penalties,
        masks: RowMasks,
        greedy: Greedy,
        token_scores: TokenScores,
    ) -> None:
        """`device_rows`: None where steps do not sample."""
        self.samples = device_rows is not None
        self._device_rows = device_rows
        self._masks = masks
        self._penalties = penalties
        self._greedy = greedy
        self._token_scores = token_scores

    def __call__(
        self, in_step: InStepSampling, logits_RV: torch.Tensor, asked: AskedRows
    ) -> InStepTokens:
        """See StepSampler."""
        processes = bool(in_step.penalties) or in_step.masks
        raw = self._greedy(logits_RV) if in_step.words or not processes else None
        raw_RV = logits_RV
        if processes and in_step.alternatives is not None:
            raw_RV = logits_RV.clone()
        self._process(in_step, logits_RV, asked)
        chosen = raw if raw is not None and not processes else self._greedy(logits_RV)
        token_R, z_R = chosen
        if in_step.samples:
            assert self._device_rows is not None
            token_R, z_R = self._device_rows.sample_random(
                logits_RV, chosen, asked.row_R, asked.position_R
            )
        if not in_step.words:
            return InStepTokens(token_R=token_R, max_logit_R=chosen[1])
        assert raw is not None
        samples_RW = self._report(in_step, raw_RV, raw[1], token_R, z_R)
        return InStepTokens(token_R=token_R, max_logit_R=raw[1], words_RW=samples_RW)

    def count(
        self,
        in_step: InStepSampling,
        token_R: torch.Tensor,
        asked: AskedRows,
        stands_R: torch.Tensor,
    ) -> None:
        """See StepSampler."""
        if in_step.penalties:
            self._penalties.count(token_R, self._penalties.slots_of(asked.row_R), stands_R)

    def _process(self, in_step: InStepSampling, logits_RV: torch.Tensor, asked: AskedRows) -> None:
        """Rewrites the logits."""
        if in_step.penalties:
            drafts_RD = None
            if asked.offset_R is not None:
                drafts_RD = drafts_before(
                    asked.tokens_MC,
                    asked.row_R,
                    asked.position_R,
                    asked.offset_R,
                    asked.most_drafts,
                )
            self._penalties.penalise(logits_RV, self._penalties.slots_of(asked.row_R), drafts_RD)
        if in_step.masks:
            self._masks.apply(
                logits_RV,
                asked.tokens_MC,
                asked.row_R,
                asked.position_R,
                grammar=in_step.grammar,
            )

    def _report(
        self,
        in_step: InStepSampling,
        raw_RV: torch.Tensor,
        max_logit_R: torch.Tensor,
        token_R: torch.Tensor,
        z_R: torch.Tensor,
    ) -> torch.Tensor:
        chosen_logit_R = (z_R - z_R).to(torch.float32)
        columns = [
            token_R.to(torch.int32),
            *(v.view(torch.int32) for v in (max_logit_R, chosen_logit_R)),
        ]
        logprobs = [column[:, None] for column in columns]
        if in_step.alternatives is not None:
            scores = ScoreTable.empty(len(token_R), 1 + in_step.alternatives, token_R.device)
            self._token_scores(raw_RV, token_R, scores)
            logprobs.append(scores.data)
        return torch.cat(logprobs, dim=1)


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """What a step reports, on the host, to be read behind `Steps.event`; index by row of the step.
    tokens int32; max_logit, chosen_logit float32: see features.Sampled; scores None: there are
    none. masked: max_logit is that of InStepTokens behind masks."""

    tokens: np.ndarray
    max_logit: np.ndarray
    chosen_logit: np.ndarray | None = None
    scores: Scores | None = None
    masked: bool = False

    @classmethod
    def of(cls, logprobs: np.ndarray, words: int, *, masked: bool = False) -> StepSamples:
        """Views of what lies in a slot: rows of W words from its beginning on, or, if W is 0,
        tokens and greatest logits, [2, M]."""
        if not words:
            max_logit = logprobs[1].view(np.float32)
            return cls(tokens=logprobs[0], max_logit=max_logit, masked=masked)
        samples_RW = logprobs[: logprobs.size // words * words].reshape(-1, words)
        tokens, max_logit, chosen_logit = samples_RW.T[:SCORES]
        scores = Scores.of(samples_RW[:, SCORES:]) if words > SCORES else None
        max_logit, chosen_logit = max_logit.view(np.float32), chosen_logit.view(np.float32)
        return cls(tokens=tokens, max_logit=max_logit, chosen_logit=chosen_logit, scores=scores)
