"""What steps need beyond plain ones to verify drafts: the drafter, the op that accepts, and where
the host stands.

A plan says how many drafts each row may have and, for rows with drafts in flight, only the greatest
position at which they may begin. On a GPU the host launches it as it is: kernels read the lengths.
A CPU is its own device: by the time a step begins the one before has run, so that the plan is made
exact, the drafts are proposed, and a step in which nothing was proposed is a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from headrace.back.attention.plan import Batch
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_inputs.op import StepInputsProblem, StepTables
from headrace.back.kernels.step_verify.op import OP as VERIFY
from headrace.back.runner.batch import Rows, StepShape, done_in_step
from headrace.back.runner.replay import Replay
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.steps import AwaitMasks, StepTensors
from headrace.back.sampling.in_step import InStepSampling
from headrace.back.sampling.top_candidates import SamplerInput
from headrace.back.speculative.drafter import Drafter
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError
from headrace.base.wire.grammar import StepMasks, unpack_masks
from headrace.base.wire.step import NO_DRAFTS, KVGroup, StepPlan


def without_drafts(plan: StepPlan) -> StepPlan:
    """The plan with the newest token of each row alone."""
    if not plan.drafts.size:
        return plan
    return replace(plan, num_tokens=plan.num_tokens - plan.drafts, drafts=NO_DRAFTS)


def check_groups(groups: Sequence[KVGroup]) -> None:
    """A recurrent state is that of one position: it does not go back to the last draft that
    stands."""
    if any(group.kind == "state" for group in groups):
        raise ConfigError(
            "--speculative-config: not with recurrent layers, whose state does not go back",
            field="speculative_config",
        )


class DraftVerification:
    """Drafts for the rows of one runner. `count_M` int32 [M+1]: drafts proposed for each row.
    `follows`: its drafter keeps something of each step of at most `max_rows` rows."""

    def __init__(
        self,
        drafter: Drafter,
        problem: StepInputsProblem,
        tables: StepTables,
        rows: Rows,
        replay: Replay,
        *,
        max_rows: int,
    ) -> None:
        """If the replay is `on_host`, a step has run by the time the next one begins, and the host
        reads what it left."""
        assert tables.length_M is not None
        self._drafter = drafter
        self._tables = tables
        self._length_M = tables.length_M
        choice = VERIFY.choose(problem)
        self._verify = choice.bind()
        self._decisions = (*drafter.decisions, *decisions((choice,)))
        self.max_drafts = drafter.max_drafts
        self.count_M = torch.zeros_like(tables.length_M)
        self._proposed_at = np.full(tables.length_M.numel(), -1, np.int32)
        self.follows = drafter.follows
        self._rows = rows
        self._replay, self._on_host, self._max_rows = replay, replay.on_host, max_rows
        self._followed = np.zeros(tables.length_M.numel(), np.int64)
        self._row_R = torch.zeros_like(tables.length_M)
        self._start_R1 = torch.zeros(tables.length_M.numel() + 1, dtype=torch.int32)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The kernels that were chosen."""
        return self._decisions

    @property
    def proposes_in_step(self) -> bool:
        """Whether drafts are proposed within the step."""
        return not self._on_host

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """The plan as it can be run, its rows having taken what it starts. On a GPU only what a
        step samples itself can be verified; what the host samples needs its exact positions,
        which the noise of a sample depends on."""
        if self._on_host:
            if self.follows and plan.drafts.size:
                self._rows.update(plan)  # the drafter's passes come before the step
            self._forget_proposed(plan)
            plan = self._exact(plan)
            return self._take_proposed(plan, masks) if plan.deferred else self._propose(plan)
        if not isinstance(needs, InStepSampling) and needs != "argmax":
            return self._exact(without_drafts(plan))
        if isinstance(needs, InStepSampling) and (needs.words or needs.grammar):
            plan = without_drafts(plan)
            decodes = max(plan.num_tokens.tolist()) == 1
            return plan if done_in_step(needs, decodes=decodes) else self._exact(plan)
        return plan

    def propose(self, row_R: torch.Tensor, query_start_R1: torch.Tensor, most: int) -> None:
        """Drafts for the rows of a step, on the device; no row wants more than `most`."""
        self._drafter.propose(row_R, query_start_R1, self._tables, self.count_M, most)

    def follow_rows(self, shape: StepShape) -> bool:
        """Whether the drafter is to follow a step; up to where it has followed its rows is kept. A
        row that begins behind a prefix hit counts as followed up to there."""
        if not self.follows or shape.rows.size > self._max_rows:
            return False
        if self._on_host:
            first = shape.position_T[shape.query_start[:-1]]
            whole = first <= self._followed[shape.rows]
            behind = np.minimum(shape.kv_len, self._length_M.numpy()[shape.rows] - 1)
            self._followed[shape.rows] = np.where(whole, behind, self._followed[shape.rows])
        return True

    def follow(
        self,
        batch: Batch,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> torch.Tensor:
        """See Drafter."""
        return self._drafter.follow(batch, row_R, query_start_R1, positions_T, self._tables)

    def _propose_here(self, rows: np.ndarray, wanted: np.ndarray) -> None:
        """As many drafts as each of these rows wants, at once; of a drafter that has not followed a
        row all the way none."""
        if self.follows:
            complete = self._followed[rows] >= self._length_M.numpy()[rows] - 1
            wanted = np.where(complete, wanted, 0)
        count, most = rows.size, int(wanted.max(initial=0))
        self._row_R.numpy()[:count] = rows
        np.cumsum(1 + wanted, out=self._start_R1.numpy()[1 : count + 1])
        row_R, start_R1 = self._row_R[:count], self._start_R1[: count + 1]
        if not self.follows:
            self.propose(row_R, start_R1, most)
            return
        self.count_M.numpy()[rows] = wanted
        if most:
            size = {"tokens": count, "rows": count, "queries": 1 + most}
            bucket = Bucket(**size, decode=False, updates=0, part="draft")
            self._replay.run(bucket, self._passes)

    def _passes(self, bucket: Bucket) -> StepTensors:
        row_R, start_R1 = self._row_R[: bucket.rows], self._start_R1[: bucket.rows + 1]
        most = bucket.queries - 1
        return StepTensors(hidden_TE=self._drafter.passes(row_R, start_R1, self._tables, most))

    def verify(
        self,
        words: torch.Tensor,
        token_T: torch.Tensor,
        value_T: torch.Tensor,
        ring_SXW: torch.Tensor,
    ) -> None:
        """See op step_verify."""
        self._verify(words, token_T, value_T, self._tables, self.count_M, ring_SXW)

    def _exact(self, plan: StepPlan) -> StepPlan:
        """The plan with the positions at which its rows begin; on a GPU the host waits for them."""
        newest = self._length_M.cpu().numpy()[plan.rows] - 1
        return replace(plan, num_computed=np.minimum(plan.num_computed, newest))

    def _propose(self, plan: StepPlan) -> StepPlan:
        """The plan with as many drafts as there are."""
        if not plan.drafts.size:
            return plan
        self._propose_here(plan.rows, plan.drafts)
        return _with_drafts(plan, np.minimum(self.count_M.numpy()[plan.rows], plan.drafts))

    # Masks must be made for the drafts of a step, by the core: so these are proposed and told
    # behind the step before. A CPU's step waits for the masks before it computes, and leaves out
    # the drafts that they forbid.

    def propose_next(self, plan: StepPlan) -> np.ndarray:
        """The drafts of the rows that the step has sampled: see StepResult.proposed."""
        if not self._on_host:
            return NO_DRAFTS
        rows = plan.rows[plan.sample].astype(np.int32)
        length, width = self._length_M.numpy()[rows], self._tables.tokens_MC.shape[1]
        wanted = np.clip(width - length, 0, self.max_drafts)
        if self.follows:
            reach = [self._drafter.reach(one) for one in length.tolist()]
            wanted = np.minimum(wanted, np.asarray(reach, np.int32))
        self._propose_here(rows, wanted)
        self._proposed_at[rows] = length
        proposed = np.full((plan.rows.size, self.max_drafts), -1, np.int32)
        count, tokens_MC = self.count_M.numpy()[rows], self._tables.tokens_MC.numpy()
        for index, row, first, num in zip(
            np.flatnonzero(plan.sample), rows, length, count, strict=True
        ):
            proposed[index, :num] = tokens_MC[row, first : first + num]
        return proposed

    def _forget_proposed(self, plan: StepPlan) -> None:
        """What was proposed for rows that have other tokens now."""
        for entry in (*plan.starts, *plan.feeds):
            self._proposed_at[entry.row] = -1
        for start in plan.starts:
            self._followed[start.row] = start.num_computed

    def _take_proposed(self, plan: StepPlan, masks: AwaitMasks) -> StepPlan:
        """The plan with the drafts that were proposed and are allowed."""
        if not plan.drafts.size:
            return plan
        proposed = self._proposed_at[plan.rows] == self._length_M.numpy()[plan.rows]
        drafts = np.where(proposed, np.minimum(self.count_M.numpy()[plan.rows], plan.drafts), 0)
        if drafts.any():
            drafts = self._allowed(plan.rows, drafts, unpack_masks(masks()))
        return _with_drafts(plan, drafts.astype(np.int32))

    def _allowed(self, rows: np.ndarray, drafts: np.ndarray, masks: StepMasks) -> np.ndarray:
        """Of so many drafts of each row those before the first that a mask forbids."""
        allowed = dict(zip(rows.tolist(), drafts.tolist(), strict=True))
        tokens_MC, length_M = self._tables.tokens_MC.numpy(), self._length_M.numpy()
        bits = masks.masks.view(np.uint32)
        for index, (row, offset) in enumerate(
            zip(masks.rows.tolist(), masks.offsets.tolist(), strict=True)
        ):
            if offset < allowed.get(row, 0):
                draft = int(tokens_MC[row, length_M[row] + offset])
                if not int(bits[index, draft >> 5]) >> (draft & 31) & 1:
                    allowed[row] = offset
        return np.asarray([allowed[row] for row in rows.tolist()], np.int32)


def _with_drafts(plan: StepPlan, drafts: np.ndarray) -> StepPlan:
    """The plan with these drafts; without any a plain one."""
    plan = without_drafts(plan)
    if not drafts.any():
        return plan
    return replace(plan, num_tokens=plan.num_tokens + drafts, drafts=drafts)
