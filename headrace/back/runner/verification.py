"""What steps need beyond plain ones to verify drafts: the drafter, the op that accepts, and where
the host stands.

A plan says how many drafts each row may have and, for rows with drafts in flight, only the greatest
position at which they may begin. On a GPU the host launches it as it is: kernels read the lengths.
A CPU is its own device: by the time a step begins the one before has run, so that the plan is made
exact, the drafts are proposed, and a step in which nothing was proposed is a plain one. So does a
GPU, whose host waits for the step before, where the host is to sample.

On a CPU the way from one step to the next has no operation of torch and no reduction of numpy
(runner/batch.py, shape_of): tables are read and written as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from msgspec.structs import replace

from headrace.back.attention.plan import Batch
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_inputs.op import StepInputsProblem, StepTables
from headrace.back.kernels.step_verify.op import OP as VERIFY
from headrace.back.kernels.upload import to_device, to_host
from headrace.back.runner.batch import Rows, StepShape
from headrace.back.runner.replay import Replay
from headrace.back.runner.results import AwaitMasks, ProposedDrafts, StepTensors
from headrace.back.runner.sizes import Bucket
from headrace.back.sampling.in_step import SamplerInput
from headrace.back.speculative.drafter import Drafter
from headrace.back.speculative.synthetic import synthetic
from headrace.base.config.resolved import Decision
from headrace.base.wire.grammar import StepMasks, unpack_masks
from headrace.base.wire.step import NO_DRAFTS, StepPlan

INEXACT_PLANS = 7
"""Plans that may have been made before the result of one with drafts was known: two, or one more
than a pipeline has stages."""


def without_drafts(plan: StepPlan) -> StepPlan:
    """The plan with the newest token of each row alone."""
    if not plan.drafts.size:
        return plan
    return replace(plan, num_tokens=plan.num_tokens - plan.drafts, drafts=NO_DRAFTS)


@dataclass(frozen=True)
class _HostArrays:
    """The tensors of a CPU's tables that drafts need, as arrays."""

    length_M: np.ndarray
    count_M: np.ndarray
    row_R: np.ndarray
    start_R1: np.ndarray


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
        rates: tuple[float, ...] = (),
    ) -> None:
        """If the replay is `on_host`, a step has run by the time the next one begins, and the host
        reads what it left. `rates`: see synthetic.py; none: drafts stand as the model says."""
        assert tables.length_M is not None
        self._drafter = drafter
        self._tables = tables
        self._length_M = tables.length_M
        choice = VERIFY.choose(problem)
        self._verify = choice.bind()
        if rates:
            self._verify = synthetic(self._verify, rates, problem, tables.length_M.device)
        self._decisions = (*drafter.decisions, *decisions((choice,)))
        self.max_drafts = drafter.max_drafts
        self.count_M = torch.zeros_like(tables.length_M)
        self._proposed_at_M = torch.full_like(tables.length_M, -1)
        self.follows = drafter.follows
        self.sees_last = self.is_followed if drafter.last_hidden else None
        self._rows = rows
        self._replay, self._on_host, self._max_rows = replay, replay.on_host, max_rows
        self._followed = np.zeros(tables.length_M.numel(), np.int64)
        self._inexact = 0  # plans to come whose positions may be bounds
        self._row_R = torch.zeros_like(tables.length_M)
        self._start_R1 = tables.length_M.new_zeros(tables.length_M.numel() + 1)
        self._host = None
        if self._on_host:
            ours = tables.length_M, self.count_M, self._row_R, self._start_R1
            self._host = _HostArrays(*(tensor.numpy() for tensor in ours))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The kernels that were chosen."""
        return self._decisions

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """The plan as it can be run, its rows having taken what it starts. What the host samples
        needs its exact positions, which the noise of a sample depends on."""
        if plan.starts or plan.feeds:
            self._forget_proposed(plan)
        if needs.in_step and not self._on_host:
            return plan
        if self._on_host and not plan.drafts.size and not self._inexact:
            return plan
        plan, self._inexact = self._exact(plan), max(0, self._inexact - 1)
        if not plan.drafts.size:
            return plan
        self._inexact = INEXACT_PLANS
        if self.follows:
            self._rows.update(plan)  # the drafter's passes come before the step
        return self._take_proposed(plan, masks) if plan.deferred else self._propose(plan)

    def propose(self, row_R: torch.Tensor, query_start_R1: torch.Tensor, most: int) -> None:
        """Drafts for the rows of a step, on the device; no row wants more than `most`."""
        self._drafter.propose(row_R, query_start_R1, self._tables, self.count_M, most)

    def is_followed(self, plan: StepPlan, shape: StepShape) -> bool:
        """Whether the drafter is to follow a step. Where the host can tell that it has lost all of
        the step's rows, it leaves them alone: it proposes nothing for them any more."""
        if not self.follows or not plan.followed or shape.rows.size > self._max_rows:
            return False
        return not self._on_host or True in self._is_whole(shape)

    def follow_rows(self, plan: StepPlan, shape: StepShape) -> bool:
        """The same, and up to where it has followed its rows is kept."""
        if not self.is_followed(plan, shape):
            return False
        if self._host is not None:
            behind = np.minimum(shape.kv_len, self._host.length_M[shape.rows] - 1).tolist()
            whole = self._is_whole(shape)
            for row, is_whole, followed in zip(shape.rows.tolist(), whole, behind, strict=True):
                if is_whole:
                    self._followed[row] = followed
        return True

    def _is_whole(self, shape: StepShape) -> list[bool]:
        """Which rows of the step it has followed up to there. One that begins behind a prefix hit
        counts as followed up to it."""
        whole_R = shape.position_T[shape.query_start[:-1]] <= self._followed[shape.rows]
        return cast("list[bool]", whole_R.tolist())

    def follow(
        self,
        batch: Batch,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
    ) -> torch.Tensor:
        """See Drafter."""
        return self._drafter.follow(batch, row_R, query_start_R1, positions_T, self._tables)

    def _propose_here(self, row_R: torch.Tensor, wanted_R: torch.Tensor, most: int) -> None:
        """As many drafts as each of these rows wants, at most `most`, at once."""
        if self._host is not None:
            self._propose_on_host(self._host, row_R.tolist(), wanted_R.tolist())
            return
        count = row_R.shape[0]
        self._row_R[:count] = row_R
        torch.cumsum(1 + wanted_R, 0, dtype=torch.int32, out=self._start_R1[1 : count + 1])
        if most:
            self.propose(self._row_R[:count], self._start_R1[: count + 1], most)

    def _propose_on_host(self, host: _HostArrays, rows: list[int], wanted: list[int]) -> None:
        """The same on a CPU."""
        count, most = len(rows), max(wanted, default=0)
        host.row_R[:count] = rows
        host.start_R1[1 : count + 1] = list(accumulate(1 + each for each in wanted))
        if self.follows:
            host.count_M[rows] = wanted
        if most and self.follows:
            size = {"tokens": count, "rows": count, "queries": 1 + most}
            bucket = Bucket(**size, decode=False, updates=0, part="draft")
            self._replay.run(bucket, self._passes)
        elif most:
            self.propose(self._row_R[:count], self._start_R1[: count + 1], most)

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
        length_M = self._length_M.cpu().numpy() if self._host is None else self._host.length_M
        newest = length_M[plan.rows] - 1
        return replace(plan, num_computed=np.minimum(plan.num_computed, newest))

    def _propose(self, plan: StepPlan) -> StepPlan:
        """The plan with as many drafts as there are."""
        wanted, host = plan.drafts, self._host
        if host is not None:
            if self.follows:
                wanted = np.where(self._followed_all(plan.rows), wanted, 0).astype(np.int32)
            self._propose_on_host(host, plan.rows.tolist(), wanted.tolist())
            return _with_drafts(plan, np.minimum(host.count_M[plan.rows], wanted))
        row_R = to_device(plan.rows, self.count_M.device)
        self._propose_here(row_R, to_device(wanted, row_R.device), int(wanted.max()))
        return _with_drafts(plan, np.minimum(self._count_of(row_R), wanted))

    def _count_of(self, row_R: torch.Tensor) -> np.ndarray:
        return self.count_M.index_select(0, row_R).cpu().numpy()

    def _followed_all(self, rows: np.ndarray) -> np.ndarray:
        """Whether the drafter has followed each of these rows all the way: of others it proposes
        nothing."""
        assert self._host is not None
        return self._followed[rows] >= self._host.length_M[rows] - 1

    # Masks must be made for the drafts of a step, by the core: so these are proposed and told
    # behind the step before. A CPU's step waits for the masks before it computes, and leaves out
    # the drafts that they forbid; a GPU's samples none of those.

    def propose_next(self, plan: StepPlan) -> ProposedDrafts | None:
        """The drafts of the rows that the step has sampled: see StepResult.proposed."""
        if not plan.sample.any():
            return None
        tokens_MC, most = self._tables.tokens_MC, self.max_drafts
        sampled, width = np.flatnonzero(plan.sample), tokens_MC.shape[1]
        row_R = to_device(plan.rows[sampled].astype(np.int64), tokens_MC.device)
        length_R = self._length_M.index_select(0, row_R)
        wanted_R = torch.minimum((width - length_R).clamp(0, most), self._drafter.reach(length_R))
        if self._on_host:
            if self.follows:
                wanted_R *= to_device(self._followed_all(plan.rows[sampled]), wanted_R.device)
            most = max(wanted_R.tolist(), default=0)
        self._propose_here(row_R.to(torch.int32), wanted_R, most)
        self._proposed_at_M.index_copy_(0, row_R, length_R)
        count_R = torch.minimum(self.count_M.index_select(0, row_R), wanted_R)
        self.count_M.index_copy_(0, row_R, count_R)
        place_D = torch.arange(self.max_drafts, device=row_R.device)
        column_RD = (length_R[:, None] + place_D).clamp_(max=width - 1)
        draft_RD = tokens_MC[row_R[:, None], column_RD]
        draft_RD = torch.where(place_D < count_R[:, None], draft_RD, -1)
        proposed_RD = draft_RD.new_full((plan.rows.size, self.max_drafts), -1)
        proposed_RD.index_copy_(0, to_device(sampled, row_R.device), draft_RD)
        return ProposedDrafts(tokens=to_host(proposed_RD).numpy(), event=self._replay.event())

    def keep_proposed(self, row_R: torch.Tensor) -> None:
        """The rows of a step keep the drafts that were proposed behind the one before, should they
        have gained nothing since. Row numbers int32 on the device, padding among them."""
        at_R = row_R.long()
        self.count_M.index_copy_(0, at_R, self._still_proposed(at_R))

    def _still_proposed(self, row_R: torch.Tensor) -> torch.Tensor:
        """How many of their drafts were proposed behind what the rows have now."""
        count_R, at_R, length_R = (
            table.index_select(0, row_R)
            for table in (self.count_M, self._proposed_at_M, self._length_M)
        )
        return torch.where(at_R == length_R, count_R, 0)

    def _forget_proposed(self, plan: StepPlan) -> None:
        """What was proposed for rows that have other tokens now."""
        rows = np.array([entry.row for entry in (*plan.starts, *plan.feeds)], np.int64)
        self._proposed_at_M.index_fill_(0, to_device(rows, self._proposed_at_M.device), -1)
        for start in plan.starts:
            self._followed[start.row] = start.num_computed
            self._drafter.start(start.row)

    def _take_proposed(self, plan: StepPlan, masks: AwaitMasks) -> StepPlan:
        """The plan with the drafts that were proposed and are allowed."""
        row_R = to_device(plan.rows.astype(np.int64), self.count_M.device)
        drafts = np.minimum(self._still_proposed(row_R).cpu().numpy(), plan.drafts)
        if self._on_host and drafts.any():
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
    if not any(drafts.tolist()):
        return plan
    return replace(plan, num_tokens=plan.num_tokens + drafts, drafts=drafts)
