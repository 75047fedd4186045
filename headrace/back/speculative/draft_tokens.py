"""Which tokens a network drafts: the best of each place, or one that is sampled as the token in its
place will be (kernels/draft_sample). Either changes how many drafts stand, and no token.

R rows, V the model's vocabulary, E what a pass of the network gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.draft_rows.op import lengths_of
from headrace.back.kernels.draft_sample.op import OP as DRAFT_SAMPLE
from headrace.back.kernels.draft_sample.op import DraftSampleProblem
from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_inputs.op import StepTables
from headrace.back.sampling.in_step import SamplingTable
from headrace.base.config.resolved import Decision


@dataclass(frozen=True, kw_only=True)
class DraftSampling:
    """Drafts are sampled, as the rows' table says; vocabulary: V."""

    table: SamplingTable
    vocabulary: int


class Drafting(Protocol):
    """What of a `DraftNetwork` says which tokens it drafts."""

    offset_D: torch.Tensor | None

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor: ...
    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor: ...


class DraftTokens(Protocol):
    """Chooses drafts. `offset_D`: what is added to what it gives to have tokens of the model."""

    offset_D: torch.Tensor | None
    decisions: tuple[Decision, ...]

    def start(self) -> None:
        """Requests have taken rows."""
        ...

    def of_pass(
        self, hidden_RE: torch.Tensor, row_R: torch.Tensor, tables: StepTables, draft: int
    ) -> torch.Tensor:
        """Tokens int64 [R] of a pass, for the draft of this number (from 0 on) of each row."""
        ...

    def of_block(
        self, hidden_QE: torch.Tensor, row_R: torch.Tensor, tables: StepTables
    ) -> list[torch.Tensor]:
        """The same of a pass over several places of each row, place after place."""
        ...

    def of_logits(
        self, logits_RV: torch.Tensor, row_R: torch.Tensor, tables: StepTables, draft: int
    ) -> torch.Tensor:
        """The same of what a place says."""
        ...


def draft_tokens(
    network: Drafting, device: torch.device, sampling: DraftSampling | None
) -> DraftTokens:
    """As drafts are to be chosen."""
    return (
        BestDrafts(network, device)
        if sampling is None
        else SampledDrafts(network, device, sampling)
    )


class BestDrafts:
    """The most likely tokens, of the network's own vocabulary."""

    def __init__(self, network: Drafting, device: torch.device) -> None:
        choice = GREEDY.choose(GreedyProblem(device=device.type))
        self._network, self._greedy = network, choice.bind()
        self.offset_D, self.decisions = network.offset_D, decisions((choice,))

    def start(self) -> None:
        """See DraftTokens: it reads nothing of them."""

    def of_pass(
        self, hidden_RE: torch.Tensor, row_R: torch.Tensor, tables: StepTables, draft: int
    ) -> torch.Tensor:
        """See DraftTokens."""
        return self._network.top(hidden_RE, draft)

    def of_block(
        self, hidden_QE: torch.Tensor, row_R: torch.Tensor, tables: StepTables
    ) -> list[torch.Tensor]:
        """See DraftTokens."""
        return list(self._network.top(hidden_QE, 0).split(row_R.shape[0]))

    def of_logits(
        self, logits_RV: torch.Tensor, row_R: torch.Tensor, tables: StepTables, draft: int
    ) -> torch.Tensor:
        """See DraftTokens."""
        token_R: torch.Tensor = self._greedy(logits_RV)[0]
        return token_R


class SampledDrafts:
    """Samples, of the model's vocabulary."""

    offset_D = None

    def __init__(self, network: Drafting, device: torch.device, sampling: DraftSampling) -> None:
        problem = DraftSampleProblem(device=device.type, vocabulary=sampling.vocabulary)
        choice = DRAFT_SAMPLE.choose(problem)
        self._network, self._table = network, sampling.table
        self._sample = choice.bind(network.offset_D)
        self.decisions = decisions((choice,))

    def start(self) -> None:
        """See DraftTokens: their numbers go to the device."""
        self._table.refresh()

    def of_pass(
        self, hidden_RE: torch.Tensor, row_R: torch.Tensor, tables: StepTables, draft: int
    ) -> torch.Tensor:
        """See DraftTokens."""
        return self.of_logits(self._network.logits(hidden_RE, draft), row_R, tables, draft)

    def of_block(
        self, hidden_QE: torch.Tensor, row_R: torch.Tensor, tables: StepTables
    ) -> list[torch.Tensor]:
        """See DraftTokens."""
        places = self._network.logits(hidden_QE, 0).split(row_R.shape[0])
        return [self.of_logits(one, row_R, tables, draft) for draft, one in enumerate(places)]

    def of_logits(
        self, logits_RV: torch.Tensor, row_R: torch.Tensor, tables: StepTables, draft: int
    ) -> torch.Tensor:
        """See DraftTokens."""
        token_R: torch.Tensor = self._sample(
            logits_RV, self._table.numbers_M, row_R, lengths_of(tables), draft
        )
        return token_R
