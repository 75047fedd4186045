"""Runs steps on one rank: plan -> rows -> batch -> model -> sampler -> result. Knows no model
family and no device; how one comes to be: start.py.

The runner owns what outlives a step: the KV memory, the sampler's state and the model's
`ModelState`; the rows belong to `Steps`, which says how a step is run on this device. `launch`
returns once everything is queued, `LaunchedStep.result` waits for it. There is one execute path;
warm-up, memory profile and self-check go through it with made-up plans (warmup.py).

T query tokens, R rows of the step, N rows sampled, E hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.layers.moe.routing_tap import RoutingTap
from headrace.back.layers.pooling import Projection
from headrace.back.layers.row_directions import RowDirections, vector_names
from headrace.back.lora.rows import RowSlots
from headrace.back.models.protocol import CausalModel
from headrace.back.parallel.pipe import Pipe
from headrace.back.runner.batch import StepShape, shape_of
from headrace.back.runner.capture import RowCaptures, num_capturable, routed_of
from headrace.back.runner.devices import StepsFactory
from headrace.back.runner.hidden_states import HiddenStateFiles
from headrace.back.runner.kv_layout import KVLayout
from headrace.back.runner.memory import KVCounts, KVMemory
from headrace.back.runner.pooler import Pooler
from headrace.back.runner.results import LaunchedStep
from headrace.back.runner.states import StateFactory
from headrace.back.runner.steps import StepResources, token_choices
from headrace.back.sampling.logprobs import PromptScorer, Scored
from headrace.back.sampling.sampler import Sampler
from headrace.back.speculative.network import DraftNetwork
from headrace.base.config.resolved import EngineSpec, max_drafted_tokens, max_forward_tokens
from headrace.base.errors import EngineError, HeadraceError
from headrace.base.wire.grammar import GRAMMAR_HOOK, NOTHING
from headrace.base.wire.media import MediaForm
from headrace.base.wire.step import RecordedGraphs, StepPlan, StepResult, WorkerFacts

log = logging.getLogger(__name__)

AwaitDeferred = Callable[[int], dict[str, memoryview]]
"""Waits for the deferred inputs of a step, by its number: payloads by hook name."""


def no_deferred_inputs(step: int) -> dict[str, memoryview]:
    """For callers whose plans defer nothing."""
    raise AssertionError(f"step {step} waits for deferred inputs, but nobody sends them")


def once(await_deferred: AwaitDeferred) -> AwaitDeferred:
    """The same, for a step that may be tried twice: its inputs are sent only once."""
    return functools.cache(await_deferred)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """What a runner is made of, decided before it is constructed (start.py)."""

    spec: EngineSpec
    model: CausalModel
    device: torch.device
    layout: KVLayout
    counts: KVCounts
    projection: Projection | None
    steps: StepsFactory
    state: StateFactory
    network: DraftNetwork | None = None
    routing: RoutingTap | None = None
    hidden: HiddenStateFiles | None = None
    directions: RowDirections | None = None
    pipe: Pipe | None = None


class Runner:
    """One rank's share of the engine. Plans must come in order, and at most RING (replay.py) of
    them before the first one's result is read.

    Invariants: a row's tokens and block tables are what the plans so far have said, plus the tokens
    sampled here; block 0 is never given to a request.
    """

    def __init__(self, plan: RunnerPlan) -> None:
        model, device, max_rows = plan.model, plan.device, plan.spec.scheduler.max_running
        self._plan, self._model, self._device = plan, model, device
        self._kv = KVMemory(plan.layout, plan.counts, device=device)
        self._state = plan.state(max_rows, device, self._kv)
        self._sampler = Sampler(
            max_rows=max_rows,
            logits_width=model.logits_width,
            device=device,
            drafted_places=max_drafted_tokens(plan.spec),
            max_places=max_forward_tokens(plan.spec),
        )
        self._prompts = PromptScorer(logits_width=model.logits_width, device=device)
        self._pooler = Pooler(model.classify, plan.projection)
        self._captures = RowCaptures(plan.routing, plan.hidden)
        self._lost: deque[np.ndarray] = deque()
        self._slots = _slots_of(plan)
        self._records_idle = True
        resources = StepResources(
            model=model,
            state=self._state,
            greedy=self._sampler.greedy,
            sample=self._sampler.in_step_sampler,
            kv=self._kv.caches,
            group_of_layer=plan.layout.group_of_cache,
            device=device,
            groups=plan.layout.group_blocks,
            slots=self._slots,
            network=plan.network,
            model_caches=len(model.kv_forms),
            sampler=self._sampler,
        )
        self._steps = plan.steps(resources, plan.spec, num_groups=len(plan.layout.groups))
        self._choices = token_choices(self._sampler, self._steps, model.logits)

    @property
    def facts(self) -> WorkerFacts:
        """What the runner states of itself, as it is now."""
        spec, model = self._plan.spec, self._model
        noted = (*self._sampler.decisions, *self._steps.decisions)
        return WorkerFacts(
            num_blocks=self._kv.counts.num_blocks,
            block_tokens=spec.kv.block_tokens,
            groups=self._kv.groups,
            logits_width=model.logits_width,
            max_rows=spec.scheduler.max_running,
            max_model_len=spec.model.max_model_len,
            generates=model.generates,
            capture_layers=num_capturable(model, spec),
            capture_heads=model.attention_heads,
            routed_experts=routed_of(spec, self._plan.routing),
            tells_states=self._plan.hidden is not None,
            control_vectors=vector_names(self._plan.directions),
            max_drafts=self._steps.max_drafts,
            encoder_tokens=model.encoder_tokens,
            encoder_vocabulary=spec.model.encoder_vocabulary,
            spectrogram=spec.model.spectrogram,
            kv_bytes=self._kv.num_bytes,
            media=self.media,
            media_tokens=self._state.media_tokens,
            media_width=self._state.media_width,
            media_rows=self._state.media_rows,
            pools_whole=self._state.pools_whole,
            block_length=0 if spec.denoising is None else spec.denoising.length,
            canvas_length=0 if spec.denoising is None else spec.denoising.canvas,
            graphs=self._steps.graphs,
            decisions=[(d.field, d.requested, d.chosen, d.why) for d in noted],
        )

    @property
    def memory(self) -> KVMemory:
        """The KV memory."""
        return self._kv

    @property
    def common_rows(self) -> tuple[int, ...]:
        """See Steps."""
        return self._steps.common_rows

    @property
    def distinct_rows(self) -> tuple[int, ...]:
        """See Steps."""
        return self._steps.distinct_rows

    @property
    def num_groups(self) -> int:
        """Groups of KV blocks."""
        return len(self._steps.rows.tables)

    @property
    def media(self) -> tuple[MediaForm, ...]:
        """The kinds of input beside text that the model takes."""
        return () if self._model.media is None else self._model.media.forms

    @property
    def max_drafts(self) -> int:
        """See Steps."""
        return self._steps.max_drafts

    @property
    def adapts(self) -> bool:
        """Whether rows may have adapters."""
        return self._slots is not None

    @property
    def samples_in_step(self) -> bool:
        """Whether steps sample the tokens of random rows themselves."""
        return bool(self._steps.common_rows) and self._sampler.device_rows is not None

    def compiling(self) -> AbstractContextManager[object] | None:
        """See Steps."""
        return self._steps.compiling()

    @torch.inference_mode()
    def record_next(self) -> RecordedGraphs:
        """Records at most one graph of a step that traffic takes, while nothing is in flight; what
        is recorded then. It only spares time later: where it fails, it is not tried again."""
        try:
            if self._records_idle:
                with self._steps.scope():
                    self._steps.record_next()
        except RuntimeError as error:  # out of memory is one
            log.warning("no more graphs are recorded while idle: %s", error)
            self._records_idle = False
        graphs = self._steps.graphs
        return msgspec.structs.replace(graphs, more=graphs.more and self._records_idle)

    def forget_content(self) -> None:
        """See ModelState."""
        self._state.forget_content()

    def release(self) -> None:
        """Gives the KV cache back, whoever still knows of it; nothing may be run afterwards."""
        self._kv.release()

    def execute(self, plan: StepPlan, *, all_hidden: bool = False) -> StepResult:
        """Runs one step to its end; `all_hidden`: as if all its hidden states were wanted."""
        result = self.launch(plan, all_hidden=all_hidden).result()
        self._settle()
        return result

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        await_deferred: AwaitDeferred = no_deferred_inputs,
        *,
        all_hidden: bool = False,
    ) -> LaunchedStep:
        """Queues one step, also before results of earlier ones are read. `await_deferred` waits for
        the payloads of its `deferred` inputs; called when all else is on its way."""
        with self._steps.scope():
            return self._launch(plan, await_deferred, all_hidden)

    def _launch(
        self, plan: StepPlan, await_deferred: AwaitDeferred, all_hidden: bool
    ) -> LaunchedStep:
        self._settle()
        if plan.deferred:
            await_deferred = once(await_deferred)
        try:
            return self._run(plan, await_deferred, all_hidden)
        except torch.OutOfMemoryError as error:
            if not self._state.repeatable:
                return _out_of_memory(plan, await_deferred, error)
            log.warning(
                "step %d: out of device memory; trying again with the cache emptied", plan.step
            )
            torch.cuda.empty_cache()
        try:
            return self._run(plan, await_deferred, all_hidden)
        except torch.OutOfMemoryError as error:
            return _out_of_memory(plan, await_deferred, error)

    def _run(self, plan: StepPlan, await_deferred: AwaitDeferred, all_hidden: bool) -> LaunchedStep:
        """Runs the step. Nothing that comes before its first kernel is in doubt if it is run again,
        as after a device that had no memory for a table that grows."""
        self._begin(plan)
        if not plan.rows.size:
            self._steps.rows.apply(plan)
            return LaunchedStep(plan=plan)
        every = all_hidden or bool(self._prompts.rows or self._pooler.rows)
        needs = self._sampler.needs(plan.rows[plan.sample], grammar=bool(plan.deferred))

        def masks() -> memoryview:
            deferred = await_deferred(plan.step) if plan.deferred else {}
            return deferred.get(GRAMMAR_HOOK, NOTHING)

        plan = self._steps.begin(plan, needs, masks)
        shape = dataclasses.replace(shape_of(plan), needs=needs, every=every)
        if self._slots is not None:
            shape = dataclasses.replace(shape, slots=self._slots.of(shape.rows))
        probe = self._captures.probe(shape) if self._captures.of_row else None

        def take_masks() -> None:
            self._sampler.take_masks(masks(), shape.sampled_row, shape.place)

        outputs = self._steps.run(plan, shape, probe=probe, take_masks=take_masks)
        prompts, refused = (
            self._score_prompts(shape, outputs.out.hidden_TE) if self._prompts.rows else ([], {})
        )
        if shape.sampled.size:
            choice = next(choice for choice in self._choices if choice.takes(shape, outputs))
            sampled = choice.choose(shape, outputs, masks)
        else:
            sampled = None
            if plan.deferred:
                await_deferred(plan.step)
        return LaunchedStep(
            plan=plan,
            event=self._steps.event(),
            shape=shape,
            sampled=sampled,
            prompts=prompts,
            pooled=self._pooler.pool(shape, outputs.out.hidden_TE) if self._pooler.rows else (),
            captured=() if probe is None else self._captures.pieces(probe, shape, self._steps.rows),
            refused=refused,
            lost=self._lost.append,
            proposed=self._steps.finish(plan, shape),  # last: it may overwrite what the step left
        )

    def _begin(self, plan: StepPlan) -> None:
        if plan.hook_payloads:
            self._state.take(plan.hook_payloads)
        if plan.ends.size:
            self._state.end(plan.ends)
            self._sampler.end(plan.ends)
            if self._prompts.rows:
                self._prompts.end(plan.ends)
            if self._pooler.rows:
                self._pooler.end(plan.ends)
            if self._captures.of_row:
                self._captures.end(plan.ends)
        if self._slots is not None:
            self._slots.begin(plan.starts)
        for start in plan.starts:
            self._state.start(start)
            self._sampler.start(start)
            if start.sampling.prompt_logprobs is not None:
                self._prompts.start(start)
            if start.pooling is not None:
                self._pooler.start(start)
            if start.sampling.capture_layers or self._captures.files is not None:
                self._captures.start(start)

    def _score_prompts(
        self, shape: StepShape, hidden_TE: torch.Tensor
    ) -> tuple[list[tuple[int, Scored]], dict[int, HeadraceError]]:
        """The prompt log-probabilities this step gives, and the rows refused, by index into the
        plan's rows."""
        scored, refused = [], {}
        for index, row in enumerate(shape.rows.tolist()):
            if (refusal := self._prompts.refusal(row)) is not None:
                refused[index] = refusal
                continue
            start, stop = shape.query_start[index : index + 2].tolist()
            if self._model.adapters is not None:
                slot = 0 if shape.slots is None else int(shape.slots[0][index])
                self._model.adapters.take_slot(slot, hidden_TE.device)
            scores = self._prompts.score(
                row,
                hidden_TE[start:stop],
                first=int(shape.position_T[start]),
                logits=self._model.logits,
            )
            if scores is not None:
                scored.append((index, scores))
        return scored, refused

    def _settle(self) -> None:
        if self._lost:
            self._clean()

    @torch.inference_mode()
    def _clean(self) -> None:
        """Removes NaN and Inf from the blocks of rows that have failed, the null block included,
        before any of these blocks can have another owner: a plan that gives them away comes after
        the result that told of the failure."""
        while self._lost:
            tables = self._steps.rows.tables
            with self._steps.scope():
                row_K = to_device(self._lost.popleft(), self._device)
                for group, table in enumerate(tables):
                    blocks = table.data.index_select(0, row_K).unique()
                    self._kv.scrub(group, blocks.to(torch.int64))


def _slots_of(plan: RunnerPlan) -> RowSlots | None:
    if plan.model.adapters is None and plan.directions is None:
        return None
    return RowSlots(
        max_rows=plan.spec.scheduler.max_running,
        max_tokens=max_forward_tokens(plan.spec),
        device=plan.device,
        directions=plan.directions,
    )


def _out_of_memory(
    plan: StepPlan, await_deferred: AwaitDeferred, error: torch.OutOfMemoryError
) -> LaunchedStep:
    """The step's requests fail; the engine goes on."""
    if plan.deferred:
        await_deferred(plan.step)  # the inputs of this step must not reach the next one
    log.error("step %d: out of device memory; its requests fail", plan.step, exc_info=error)
    full = EngineError("the device ran out of memory in this request's step")
    return LaunchedStep(plan=plan, refused=dict.fromkeys(range(plan.rows.size), full))
