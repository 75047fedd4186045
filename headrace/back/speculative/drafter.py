"""The seam between steps and what proposes their drafts.

A drafter runs inside the step, on the device, in front of the model: what it reads and writes lies
there, and no value of it goes to the host. It writes at most the wanted number of tokens behind
each row's own, and says how many; which of them stand is not its business (kernels/step_verify).

A drafter with weights has caches of its own beside the model's, in the same blocks. It `follows`
each step once the tokens are chosen, so that its caches hold what the model's do.
"""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.attention.plan import Batch, HiddenTaps
from headrace.back.kernels.step_inputs.op import StepTables
from headrace.base.config.resolved import Decision


class Drafter(Protocol):
    """Proposes tokens for the rows of a step.

    max_drafts   of a row in a step
    taps         what it sees of the model's hidden states; None: nothing
    last_hidden  it sees those behind the last layer, of all tokens of a step
    follows      it keeps something of each step; then block tables must be up to date when it
                 proposes
    """

    max_drafts: int
    taps: HiddenTaps | None
    last_hidden: bool
    follows: bool

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was chosen for it."""
        ...

    def propose(
        self,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        most: int,
    ) -> None:
        """Row r wants at most query_start[r + 1] - query_start[r] - 1 drafts (int32 [R], [R+1]), no
        row more than `most`. They are written into its table from position `length` on, their
        number into count_M int32 [M+1].
        """
        ...

    def passes(
        self, row_R: torch.Tensor, query_start_R1: torch.Tensor, tables: StepTables, most: int
    ) -> torch.Tensor:
        """The same without the numbers, of a drafter that follows: every row gets what it wants.
        What the last pass gave."""
        ...

    def follow(
        self,
        batch: Batch,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
    ) -> torch.Tensor:
        """A step has run, and its rows have their tokens: keeps what it needs of them. positions
        int64 [T]: of tokens in their rows. Returns what its last layer gives."""
        ...

    def start(self, row: int) -> None:
        """A request takes a row; where the host knows drafts before the step."""
        ...

    def reach(self, length_R: torch.Tensor) -> torch.Tensor:
        """Drafts that rows of so many tokens can have before they are given further blocks."""
        ...


class TextDrafter:
    """What drafters have in common that read the rows' text alone."""

    taps = None
    last_hidden = False
    follows = False

    def passes(
        self, row_R: torch.Tensor, query_start_R1: torch.Tensor, tables: StepTables, most: int
    ) -> torch.Tensor:
        """Nobody asks for it."""
        raise AssertionError("it has no passes")

    def follow(
        self,
        batch: Batch,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
    ) -> torch.Tensor:
        """Nobody asks for it."""
        raise AssertionError("it keeps nothing of steps")

    def start(self, row: int) -> None:
        """It keeps nothing of rows."""

    def reach(self, length_R: torch.Tensor) -> torch.Tensor:
        """As many as it likes."""
        return torch.full_like(length_R, 1 << 30)
