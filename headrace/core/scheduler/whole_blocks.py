"""Models that write blocks of text (diffusion language models), as the scheduler sees them: a step
brings each decoding row the rest of its block, as one whose drafts all stand, or as much of it as
fits into a KV block.

The workers decide a whole block when its first token is wanted, and keep it. So a step beside
prompts, in which no row has drafts, brings a row one token of its block, and the steps behind it
bring the others at no cost. A step's positions are exact: nothing that was promised does not come.
The blocks of KV are there: see kv/kinds.py, BlockwiseKind.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.wire.step import StepResult, WorkerFacts
from headrace.core.request import Request, RowTable
from headrace.core.scheduler.plan_builder import InFlightStep, NoSpeculation, StepPlanBuilder

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


class WholeBlocks(NoSpeculation):
    """Blocks of tokens, counted from the beginning of a text, or of what is written of it."""

    def __init__(self, rows: RowTable, facts: WorkerFacts) -> None:
        super().__init__()
        self._rows, self._length = rows, facts.block_length
        self._most = max(facts.block_tokens, 2) - 1
        self._counts_prompt = not facts.canvas_length
        self._first = np.zeros(rows.num_rows, np.int32)

    def start(self, row: int, request: Request) -> None:
        """See Speculation."""
        self._first[row] = 0 if self._counts_prompt else request.num_prompt

    def add_drafts(self, builder: StepPlanBuilder) -> None:
        """See Speculation: up to the end of each row's block, or of its answer."""
        decoding, rows = builder.decodes, self._rows
        if not len(decoding):
            return
        length = rows.length[decoding]
        rest = (self._first[decoding] - length) % self._length
        drafts = np.minimum(np.minimum(rest, self._most), rows.limit[decoding] - length)
        if drafts.any():
            builder.add_drafts(drafts.astype(np.int32))

    def give_up(self, in_flight: InFlightStep, void: Bool) -> None:
        """See Speculation."""
        self._settle(in_flight, void, stands=False)

    def positions(self, in_flight: InFlightStep) -> Int32:
        """See Speculation."""
        drafts = in_flight.drafts
        return in_flight.position - drafts if len(drafts) else in_flight.position

    def settle(self, in_flight: InFlightStep, result: StepResult, live: Bool) -> None:
        """See Speculation: all of it has come."""
        self._settle(in_flight, live & in_flight.sample, stands=True)

    def _settle(self, in_flight: InFlightStep, which: Bool, *, stands: bool) -> None:
        if len(in_flight.drafts):
            drafts = in_flight.drafts[which]
            accepted = drafts if stands else np.zeros_like(drafts)
            self._rows.settle_drafts(in_flight.rows[which], drafts, accepted)
