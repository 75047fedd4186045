"""The seam between steps and what proposes their drafts.

A drafter runs inside the step, on the device, in front of the model: what it reads and writes lies
there, and no value of it goes to the host. It writes at most the wanted number of tokens behind
each row's own, and says how many; which of them stand is not its business (kernels/step_verify).
"""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.kernels.step_inputs.op import StepTables
from headrace.base.config.resolved import Decision


class Drafter(Protocol):
    """Proposes tokens for the rows of a step."""

    max_drafts: int
    """Of a row in a step."""

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
    ) -> None:
        """Row r wants at most query_start[r + 1] - query_start[r] - 1 drafts (int32 [R], [R+1]).
        They are written into its table from position `length` on, their number into count_M int32
        [M+1].
        """
        ...
