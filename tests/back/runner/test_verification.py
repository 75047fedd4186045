"""Plans of steps whose rows have drafts in flight (SPC-02): where they begin is known to the device alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.back.kernels.step_inputs.op import StepInputsProblem, StepTables
from headrace.back.runner.batch import GrowingTable, Rows
from headrace.back.runner.verification import DraftVerification
from headrace.back.sampling.in_step import HeadOutput, InStepSampling, SamplerInput
from headrace.back.speculative.ngram import NgramDrafter
from headrace.base.config.resolved import SpeculationSpec
from headrace.base.wire.grammar import NOTHING, MaskBuffer
from headrace.base.wire.step import NO_DRAFTS, RowFeed, StepPlan
from tests.back.runner.test_runner import Calls

NONE = np.zeros(0, np.int32)
ROWS, BOUNDS, LENGTHS = [2, 0], [30, 41], [25, 39]
"""Two rows that decode: the greatest positions at which they may begin, and the tokens they have."""


def verification(*, on_host: bool) -> DraftVerification:
    length_M = torch.zeros(4, dtype=torch.int32)
    length_M[ROWS] = torch.tensor(LENGTHS, dtype=torch.int32)
    tables = StepTables(
        tokens_MC=torch.zeros((4, 64), dtype=torch.int32),
        blocks_GMB=torch.zeros((1, 4, 4), dtype=torch.int32),
        length_M=length_M,
    )
    problem = StepInputsProblem(device="cpu", block_tokens=16, max_rows=3, speculates=True)
    spec = SpeculationSpec(method="ngram", num_tokens=3, max_rows=4)
    drafter = NgramDrafter(spec, torch.device("cpu"))
    replay = Calls()
    replay.on_host = on_host
    tokens = GrowingTable(tables.tokens_MC)
    rows = Rows(tokens, (GrowingTable(tables.blocks_GMB[0]),), block_tokens=16, step_tables=tables)
    return DraftVerification(drafter, problem, tables, rows, replay, max_rows=3)


def plan_of(*, prompt: bool, drafts: bool) -> StepPlan:
    """The two rows, and a chunk of five tokens of a third if there is a prompt."""
    rows = [*ROWS, 1] if prompt else ROWS
    tokens = [1, 1, 5] if prompt else [4, 4] if drafts else [1, 1]
    columns = {"rows": rows, "num_tokens": tokens, "num_computed": [*BOUNDS, 0][: len(rows)]}
    return StepPlan(
        step=1,
        ends=NONE,
        starts=[],
        block_group=NONE,
        block_row=NONE,
        block_index=NONE,
        block_id=NONE,
        sample=np.ones(len(rows), bool),
        drafts=np.array([3, 3], np.int32) if drafts else NO_DRAFTS,
        **{name: np.array(values, np.int32) for name, values in columns.items()},
    )


@pytest.mark.parametrize(
    ("needs", "prompt", "exact", "drafts"),
    [
        (HeadOutput.ARGMAX, False, False, True),
        (InStepSampling(), False, False, True),
        (InStepSampling(), True, False, False),
        (InStepSampling(penalties=8), False, False, True),
        (InStepSampling(alternatives=5), False, False, True),
        (InStepSampling(masks=True, grammar=True), False, False, True),
        (InStepSampling(masks=True), True, False, False),
        (InStepSampling(masks=True, grammar=True), True, False, False),
        (InStepSampling(penalties=8), True, False, False),
        (InStepSampling(alternatives=5), True, False, False),
        # The noise of what the host samples depends on the exact position.
        (HeadOutput.LOGITS, True, True, False),
        (HeadOutput.LOGITS, False, True, True),
        (HeadOutput.TOP_CANDIDATES, False, True, True),
    ],
)
def test_what_the_host_samples_has_exact_positions(
    needs: SamplerInput, prompt: bool, exact: bool, drafts: bool
) -> None:
    plan = plan_of(prompt=prompt, drafts=not prompt)
    steps = verification(on_host=False)
    steps._tables.tokens_MC[:, :40] = torch.tensor([7, 8, 9, 10] * 10)
    begun = steps.begin(plan, needs, lambda: NOTHING)
    begins = [length - 1 for length in LENGTHS] if exact else BOUNDS
    assert begun.num_computed[:2].tolist() == begins
    assert begun.drafts.tolist() == ([3, 3] if drafts else [])
    tokens = [4, 4] if drafts else [1, 1]
    assert begun.num_tokens.tolist() == [*tokens, 5][: len(begun.rows)]


def test_drafts_that_are_told_are_cut_by_their_masks() -> None:
    """Behind a step that waits for masks the next one's drafts are told; a draft without a mask is
    free, and nothing stands behind one that is forbidden."""
    steps = verification(on_host=True)
    steps._tables.tokens_MC[:, :40] = torch.tensor([7, 8, 9, 10] * 10)
    proposed = steps.propose_next(plan_of(prompt=False, drafts=False))
    assert proposed is not None and proposed.read().tolist() == [[8, 9, 10], [10, 7, 8]]
    buffer = MaskBuffer(1)
    buffer.begin(np.array([2, 0], np.int32))[:] = [[1 << 8], [1 << 10]]
    buffer.add(np.array([2], np.int32), offset=1)[:] = [[1 << 10]]
    plan = replace(plan_of(prompt=False, drafts=True), deferred=("grammar",))
    begun = steps.begin(plan, HeadOutput.LOGITS, buffer.payload)
    assert begun.drafts.tolist() == [1, 3] and begun.num_tokens.tolist() == [2, 4]
    assert begun.num_computed.tolist() == [length - 1 for length in LENGTHS]
    feed = RowFeed(row=0, start=39, tokens=np.array([1], np.int32))
    begun = steps.begin(replace(plan, feeds=[feed]), HeadOutput.LOGITS, buffer.payload)
    assert begun.drafts.tolist() == [1, 0], "of a row that was given tokens nothing was told"
