"""Drafts from a row's own text (Saxena 2023, "Prompt Lookup Decoding"; kernels/ngram_draft). No
model, no state: worth it where answers copy, in edits, extraction and code, and nearly free
elsewhere."""

from __future__ import annotations

import torch

from headrace.back.kernels.ngram_draft.op import OP, NgramDraftProblem
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_inputs.op import StepTables
from headrace.back.speculative.drafter import TextDrafter
from headrace.base.config.resolved import Decision, SpeculationSpec


class NgramDrafter(TextDrafter):
    """A `Drafter` by prompt lookup."""

    def __init__(self, spec: SpeculationSpec, device: torch.device) -> None:
        problem = NgramDraftProblem(
            device=device.type, min_match=spec.min_match, max_match=spec.max_match
        )
        choice = OP.choose(problem)
        self.max_drafts = spec.num_tokens
        self._decisions = decisions((choice,))
        self._draft = choice.bind()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Drafter."""
        return self._decisions

    def propose(
        self,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        most: int,
    ) -> None:
        """See Drafter."""
        self._draft(row_R, query_start_R1, tables, count_M)
