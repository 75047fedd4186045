"""Steps of a few fixed sizes, whose whole work is on the device: what can be recorded once and
replayed.

A step costs the host one packed message, one copy and one launch; kernels build positions, slots
and tables from the message and from the rows' tables (kernels/step_inputs), and put the sampled
tokens back into the rows and into a ring that is copied to the host on a stream of its own
(kernels/step_commit). All tensors of steps are made once, for the largest bucket, and shared by all
buckets: steps run one after another.

T query tokens and R rows of a bucket (padded), N rows sampled, G KV groups, M most rows, S ring
slots.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, AttentionProbe, Batch
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_commit.op import OP as COMMIT
from headrace.back.kernels.step_inputs.op import OP as INPUTS
from headrace.back.kernels.step_inputs.op import ROWS, SLOT, StepInputsProblem, StepOut
from headrace.back.kernels.upload import to_device
from headrace.back.runner.batch import Rows, StepMessage, StepShape
from headrace.back.runner.exact_steps import ExactSteps, whole_prompts
from headrace.back.runner.graph_usage import GraphUsage
from headrace.back.runner.media_steps import MediaSteps
from headrace.back.runner.replay import (
    RING,
    DeferredSampling,
    Replay,
    SampleRing,
    StaticTensors,
    StepFrame,
    asked_rows,
    step_tables,
)
from headrace.back.runner.results import (
    AwaitMasks,
    ProposedDrafts,
    StepEvent,
    StepOutputs,
    StepTensors,
)
from headrace.back.runner.sizes import Bucket, Buckets, SizesFactory
from headrace.back.runner.steps import Commit, StepResources, TakeMasks, head_shortcuts
from headrace.back.runner.verification import DraftVerification
from headrace.back.sampling.in_step import (
    MOST_WORDS,
    HeadOutput,
    InStepSampling,
    SamplerInput,
    StepSamples,
)
from headrace.back.speculative.drafter import Drafter
from headrace.base.config.resolved import Decision
from headrace.base.wire.step import RecordedGraphs, StepPlan

FORWARD = InStepSampling(masks=True, grammar=True)
"""Of steps that end with logits, as those do which then wait for masks."""
MOST_FRAMES = 512
"""Views of the static tensors that are kept, by size."""


class BucketSteps:
    """`Steps` by buckets. See the top of the file; the state must be `in_graphs`. `draft_rows`:
    steps of more rows have no drafts, and no drafter follows them."""

    def __init__(
        self,
        resources: StepResources,
        replay: Replay,
        *,
        sizes: SizesFactory = Buckets,
        num_groups: int,
        block_tokens: int,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        drafter: Drafter | None = None,
        draft_rows: int = 0,
        usage: GraphUsage | None = None,
    ) -> None:
        device, self._resources, self._replay = resources.device, resources, replay
        self._shortcuts = head_shortcuts(resources.model)
        self._heads = {HeadOutput.LOGITS, *self._shortcuts}
        self.buckets = buckets = sizes(max_rows=max_rows, max_tokens=max_tokens, groups=num_groups)
        self._problem = problem = StepInputsProblem(
            device=device.type,
            block_tokens=block_tokens,
            max_rows=max_rows,
            speculates=drafter is not None,
            groups=resources.groups,
        )
        inputs, commit = INPUTS.choose(problem), COMMIT.choose(problem)
        self._inputs, self._commit = inputs.bind(), commit.bind()
        self._chosen = decisions((inputs, commit))
        self.common_rows, self.distinct_rows = buckets.common_rows, buckets.distinct_rows
        tables = self._tables = step_tables(
            max_rows=max_rows,
            max_model_len=max_model_len,
            groups=problem.groups_of(num_groups),
            block_tokens=block_tokens,
            device=device,
            speculates=drafter is not None,
        )
        rows = self.rows = Rows.over(self._tables, resources.groups, block_tokens=block_tokens)
        self._speculation: DraftVerification | None = None
        if drafter is not None:
            self._speculation = DraftVerification(
                drafter, problem, tables, rows, replay, max_rows=draft_rows, rates=resources.rates
            )
        self.max_drafts = 0 if drafter is None else drafter.max_drafts
        taps = self._taps = None if drafter is None else drafter.taps
        self._sees_last = None if self._speculation is None else self._speculation.sees_last
        self._exact = ExactSteps(resources, self.rows, taps=taps)
        self._newest: Bucket | None = None
        apart = replay.on_host or drafter is not None
        self._media = MediaSteps(resources.state, max_tokens, block_tokens, apart)
        self._expands = not replay.on_host and resources.model.host_pairs is not None
        self._message = StepMessage(problem, self._tables, buckets.largest.updates, slots=RING)
        self._argmax_ring = SampleRing((2, max_tokens if drafter is not None else max_rows), device)
        drafted = min(max_tokens, 2 * draft_rows * (1 + self.max_drafts))  # with padding
        self._sampled_ring = SampleRing((max(max_rows, drafted) * MOST_WORDS,), device)
        self._static = StaticTensors(max_tokens, self._tables)
        self._frames: dict[Bucket, StepFrame] = {}
        self._usage = usage or GraphUsage()
        replay.follow()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Steps."""
        more = () if self._speculation is None else self._speculation.decisions
        kept = () if self._usage.decision is None else (self._usage.decision,)
        return (*self._chosen, *more, *self._replay.decisions, *kept)

    @property
    def graphs(self) -> RecordedGraphs:
        """See Steps."""
        replay = self._replay
        return RecordedGraphs(
            count=replay.num_graphs, num_bytes=replay.num_bytes, more=self._next() is not None
        )

    def record_next(self) -> None:
        """See Steps. The step runs on a message of padding alone."""
        self._usage.save()
        if (bucket := self._next()) is not None:
            self._message.send_padding(bucket)
            waits = bucket.sampler_input.grammar
            rest = DeferredSampling(lambda: None, self._sampled) if waits else None
            self._replay.record(bucket, self._step, rest)

    def _next(self) -> Bucket | None:
        by_use = self._usage.by_use(self.buckets)
        return next((one for one in by_use if self._can(one) and self._replay.wants(one)), None)

    def _can(self, bucket: Bucket) -> bool:
        """Whether this model's steps take the bucket's form."""
        if bucket.samples_apart or (bucket.verifies and self._speculation is None):
            return False
        if bucket.media and not self._media.trusted:
            return False
        way = bucket.sampler_input
        return way.head in self._heads and way.runs_with(self._resources.sample)

    def begin(self, plan: StepPlan, needs: SamplerInput, masks: AwaitMasks) -> StepPlan:
        """See Steps."""
        self.rows.begin(plan)
        return plan if self._speculation is None else self._speculation.begin(plan, needs, masks)

    def commit(
        self, shape: StepShape, token_N: torch.Tensor, max_logit_N: torch.Tensor
    ) -> np.ndarray:
        """See Steps."""
        return self._exact.commit(shape, token_N, max_logit_N)

    @property
    def verify(self) -> Commit | None:
        """See Steps."""
        return None if self._speculation is None else self._verified

    def _verified(
        self, shape: StepShape, token_N: torch.Tensor, max_logit_N: torch.Tensor
    ) -> np.ndarray:
        """Drafts are verified on the message and the tables of their step."""
        assert self._speculation is not None
        ring, slot = self._argmax_ring, self._message.slot
        self._speculation.verify(self._message.words, token_N, max_logit_N, ring.data)
        assert self._newest is not None and self._tables.length_M is not None
        self._resources.state.accept(self._frame_of(self._newest).batch, self._tables.length_M)
        self._replay.read(ring.host[slot], ring.slots[slot])
        return ring.samples(slot, 0, False).tokens[: shape.place.size]

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        return self._replay.scope()

    def compiling(self) -> AbstractContextManager[object] | None:
        """See Steps."""
        return self._replay.compiling()

    def run(
        self,
        plan: StepPlan,
        shape: StepShape,
        *,
        take_masks: TakeMasks,
        probe: AttentionProbe | None = None,
    ) -> StepOutputs:
        """See Steps. One that is looked into, or whose sizes the model wants on the host, is run by
        itself, over the same rows and cache."""
        if probe is not None or self._wants_host(shape):
            self._newest = None
            exact = self._exact.run(plan, shape, probe=probe, take_masks=take_masks)
            return self._media.compared(exact, plan, shape, self.run)
        needs, size = shape.needs, {"tokens": int(shape.query_start[-1]), "rows": shape.rows.size}
        bucket = self.buckets.of(**size, whole=self._expands and whole_prompts(shape))
        if shape.verifies:
            needs = needs.of_drafts()
            bucket = self.buckets.verifying(**size, queries=shape.max_query_len)
            bucket = replace(bucket, commits=needs.in_step)
        if needs.head in self._heads and (bucket.decode or shape.verifies or needs.reads_rows):
            bucket = replace(bucket, sampler_input=needs)
        if not (bucket.decode or shape.verifies) and (
            shape.every or (self._sees_last is not None and self._sees_last(plan, shape))
        ):
            bucket = replace(bucket, every=True)
        if shape.slots is not None and (slots := self._resources.slots) is not None:
            slots.send(shape.slots, shape.query_start, tokens=bucket.tokens, rows=bucket.rows)
            bucket = replace(bucket, adapted=True)
        if self._media.records:
            bucket = self._media.bucket(bucket, shape)
        if plan.step >= 0:
            self._usage.counts[bucket] += 1
        self._newest = bucket
        slot = self._message.send(bucket, plan, shape, self.rows)
        sampling = bucket.sampler_input
        if not sampling.reads_rows:
            out = self._replay.run(bucket, self._step)
            samples = self._read(self._argmax_ring, slot)
            return StepOutputs(
                out=out, index=shape.place, samples=samples if needs.in_step else None
            )
        rest = DeferredSampling(take_masks, self._sampled) if sampling.grammar else None
        if bucket.samples_apart:
            out = self._replay.run(replace(bucket, sampler_input=FORWARD), self._step)
            out = self._sampled(bucket, out) if rest is None else rest(bucket, out)
        else:
            out = self._replay.run(bucket, self._step, rest)
        ring = self._sampled_ring if sampling.words else self._argmax_ring
        samples = self._read(ring, slot, sampling.words, sampling.masks)
        if bucket.verifies and sampling.words:  # which of them stand the other ring says
            samples = replace(samples, tokens=self._read(self._argmax_ring, slot).tokens)
        return StepOutputs(out=out, index=shape.place, samples=samples)

    def _wants_host(self, shape: StepShape) -> bool:
        if self._media.waits and self._media.reached(shape):
            return True
        least = self._resources.model.host_pairs
        return least is not None and not shape.verifies and self._host_pairs(shape) >= least

    def _host_pairs(self, shape: StepShape) -> int:
        return 0 if self._expands and whole_prompts(shape) else shape.prompt_pairs

    def _read(
        self, ring: SampleRing, slot: int, words: int = 0, masked: bool = False
    ) -> StepSamples:
        self._replay.read(ring.host[slot], ring.slots[slot])
        return ring.samples(slot, words, masked)

    def event(self) -> StepEvent:
        """See Steps."""
        return self._replay.event()

    def finish(self, plan: StepPlan, shape: StepShape) -> ProposedDrafts | None:
        """See Steps. What is kept of a step is work of its own, replayed as the step is."""
        speculation = self._speculation
        return None if speculation is None else self._finish(speculation, plan, shape)

    def _finish(
        self, speculation: DraftVerification, plan: StepPlan, shape: StepShape
    ) -> ProposedDrafts | None:
        if speculation.follow_rows(plan, shape):
            self._follow_newest(speculation, shape)
        return speculation.propose_next(plan) if plan.deferred else None

    def _follow_newest(self, speculation: DraftVerification, shape: StepShape) -> None:
        if self._newest is not None:
            plain = {"sampler_input": HeadOutput.LOGITS, "commits": True, "adapted": False}
            self._replay.run(replace(self._newest, **plain, part="follow"), self._follow)
            return
        batch = self._exact.batch
        assert batch is not None and batch.row_R is not None
        position_T = to_device(shape.position_T, self._resources.device)
        row_R, start_R1 = batch.row_R.to(torch.int32), batch.plans[0].query_start_R1
        speculation.follow(batch, row_R, start_R1, position_T)

    def _follow(self, bucket: Bucket) -> StepTensors:
        """Behind the step of this size that ran last, on the tensors that it was built of."""
        assert self._speculation is not None
        frame = self._frame_of(bucket)
        row_R = self._message.section(0, bucket.rows)
        start_R1 = self._message.section(2, bucket.rows + 1)
        positions_T = frame.out.positions_T
        hidden = self._speculation.follow(frame.batch, row_R, start_R1, positions_T)
        return StepTensors(hidden_TE=hidden)

    def _frame_of(self, bucket: Bucket) -> StepFrame:
        """Made once for each bucket."""
        if bucket not in self._frames:
            if len(self._frames) >= MOST_FRAMES:
                self._frames.clear()
            frame, slots = self._frame(bucket), self._resources.slots
            batch = slots.on(frame.batch) if bucket.adapted and slots is not None else frame.batch
            self._frames[bucket] = replace(frame, batch=self._media.on(bucket, batch))
        return self._frames[bucket]

    def _propose(self, bucket: Bucket, out: StepOut) -> None:
        """Drafts for the rows of a step, in front of it; behind its updates of block tables, where
        they are written to. Where steps wait for masks, rows keep those that have masks."""
        assert self._speculation is not None
        row_R = self._message.section(0, bucket.rows)
        if bucket.sampler_input.grammar:
            self._speculation.keep_proposed(row_R)
            return
        if self._speculation.follows:
            self._inputs(self._message.words, self._tables, out)
        starts_R1 = self._message.section(2, bucket.rows + 1)
        self._speculation.propose(row_R, starts_R1, bucket.queries - 1)

    def _step(self, bucket: Bucket) -> StepTensors:
        """The whole step on the device, from the message that was copied last to the ring."""
        frame, model, words = self._frame_of(bucket), self._resources.model, self._message.words
        if bucket.queries and bucket.commits and not self._replay.on_host:
            self._propose(bucket, frame.out)
        self._inputs(words, self._tables, frame.out)
        if frame.ones_R1 is not None:  # padding rows have no query
            torch.minimum(self._static.place[: bucket.rows + 1], words[ROWS], out=frame.ones_R1)
        self._resources.state.before(frame.batch)
        hidden_TE = model.forward(frame.batch)
        self._resources.state.after(frame.batch, hidden_TE)
        return _LEAVE[bucket.sampler_input.head](self, bucket, hidden_TE)

    def leave_candidates(self, bucket: Bucket, hidden_TE: torch.Tensor) -> StepTensors:
        """Top candidates: the sampler puts the tokens into the rows."""
        best = self._shortcuts[HeadOutput.TOP_CANDIDATES](hidden_TE)
        return StepTensors(hidden_TE=hidden_TE, top_candidates=best)

    def leave_argmax(self, bucket: Bucket, hidden_TE: torch.Tensor) -> StepTensors:
        """The argmax alone, which the rows have."""
        argmax = self._shortcuts[HeadOutput.ARGMAX](hidden_TE)
        self._put(bucket, *argmax)
        return StepTensors(hidden_TE=hidden_TE, argmax=argmax)

    def leave_logits(self, bucket: Bucket, hidden_TE: torch.Tensor) -> StepTensors:
        """Logits and the argmax; of a step that samples as its rows ask what is left behind that,
        or before the masks that it waits for."""
        wanted = hidden_TE
        if bucket.every:
            wanted = hidden_TE.index_select(0, self._frame_of(bucket).out.last_R)
        logits_RV = self._resources.model.logits(wanted)
        if bucket.sampler_input.in_step:
            tensors = StepTensors(hidden_TE=hidden_TE, logits_RV=logits_RV)
            return tensors if bucket.sampler_input.grammar else self._sampled(bucket, tensors)
        argmax = self._resources.greedy(logits_RV)
        self._put(bucket, *argmax)
        return StepTensors(hidden_TE=hidden_TE, logits_RV=logits_RV, argmax=argmax)

    def _put(self, bucket: Bucket, token_R: torch.Tensor, value_R: torch.Tensor) -> None:
        """The step's choice goes into the rows and the ring, unless the host's sampler makes it."""
        words = self._message.words
        if not bucket.queries:
            self._commit(words, token_R, value_R, self._tables, self._argmax_ring.data)
        elif bucket.commits:
            assert self._speculation is not None
            self._speculation.verify(words, token_R, value_R, self._argmax_ring.data)
            assert self._tables.length_M is not None
            self._resources.state.accept(self._frame_of(bucket).batch, self._tables.length_M)

    def _sampled(self, bucket: Bucket, tensors: StepTensors) -> StepTensors:
        """Samples the rows as they ask; what is reported of them goes into the ring."""
        in_step, logits_RV = bucket.sampler_input, tensors.logits_RV
        assert isinstance(in_step, InStepSampling) and logits_RV is not None
        assert self._resources.sample is not None
        out, words = self._frame_of(bucket).out, self._message.words
        asked = asked_rows(
            bucket,
            out,
            self._kv_len(bucket, out),
            self._tables.tokens_MC,
            *(self._message.section(i, bucket.rows + (i == 2)) for i in (0, 2, 3)),
        )
        chosen = self._resources.sample(in_step, logits_RV, asked)
        if chosen.words_RW is not None:
            self._sampled_ring.data[:, : chosen.words_RW.numel()].index_copy_(
                0, words[SLOT : SLOT + 1].long(), chosen.words_RW.view(1, -1)
            )
        self._put(bucket, chosen.token_R, chosen.max_logit_R)
        stands_R = asked.sample_R
        if bucket.verifies:
            slot = self._argmax_ring.data[:, 0].index_select(0, words[SLOT : SLOT + 1].long())
            stands_R = (slot[0, : bucket.tokens] >= 0).to(torch.int32)
        self._resources.sample.count(in_step, chosen.token_R, asked, stands_R)
        return tensors

    def _kv_len(self, bucket: Bucket, out: StepOut) -> torch.Tensor:
        """Each row's tokens with KV behind the step: the message's, or what its bounds come to."""
        return self._message.section(1, bucket.rows) if out.kv_len_R is None else out.kv_len_R

    def _frame(self, bucket: Bucket) -> StepFrame:
        out = self._static.out(bucket)
        starts_R1 = self._message.section(2, bucket.rows + 1)
        batch = Batch(
            token_ids_T=out.token_ids_T,
            positions_T=out.positions_T,
            plans=self._plans(bucket, out, starts_R1, bucket.most_queries),
            group_of_layer=self._resources.group_of_layer,
            kv=self._resources.kv,
            logits_at_N=out.last_R,
            row_R=self._message.section(0, bucket.rows),
            taps=self._taps,
        )
        if bucket.queries:
            return StepFrame(out=out, batch=self._resources.state.verifying(batch))
        if bucket.decode or bucket.every:
            return StepFrame(out=out, batch=batch)
        ones_R1 = self._static.ones[: bucket.rows + 1]
        last_token_batch = replace(batch, plans=self._plans(bucket, out, ones_R1, 1))
        return StepFrame(
            out=out, batch=replace(batch, last_token_batch=last_token_batch), ones_R1=ones_R1
        )

    def _plans(
        self, bucket: Bucket, out: StepOut, starts_R1: torch.Tensor, most: int
    ) -> tuple[AttentionPlan, ...]:
        """The plan of each group for rows of at most so many queries."""
        kv_len_R = self._kv_len(bucket, out)
        num_groups = len(out.slots_GT)
        lengths = [kv_len_R] * num_groups if out.lengths_GR is None else list(out.lengths_GR)
        return tuple(
            AttentionPlan(
                query_start_R1=starts_R1,
                kv_len_R=length_R,
                block_table_RB=table_RB,
                slot_T=slot_T,
                host_query_start=None,
                host_kv_len=None,
                num_decodes=bucket.rows if most == 1 else 0,
                max_query_len=most,
                max_kv_len=table_RB.shape[1] * self._problem.block_tokens,
                whole_prompts=bucket.whole and most > 1,
            )
            for slot_T, table_RB, length_R in zip(
                out.slots_GT, out.tables_GRB, lengths, strict=True
            )
        )


_LEAVE = {
    HeadOutput.LOGITS: BucketSteps.leave_logits,
    HeadOutput.ARGMAX: BucketSteps.leave_argmax,
    HeadOutput.TOP_CANDIDATES: BucketSteps.leave_candidates,
}
"""What a step leaves, by what the model's head computes."""
