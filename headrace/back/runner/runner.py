"""Runs steps on one rank: plan -> rows -> batch -> model -> sampler -> result. Knows no model
family and no device.

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
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from headrace.back.kernels.op import DeferredChecks
from headrace.back.kernels.upload import to_device, to_host
from headrace.back.models.load.dense import load_projection
from headrace.back.models.protocol import CausalModel
from headrace.back.runner.batch import StepShape, shape_of
from headrace.back.runner.capture import LayersOfRow, capture_of, forget_rows, num_capturable
from headrace.back.runner.devices import StepsFactory, make_steps, profile_step
from headrace.back.runner.memory import (
    KVLayout,
    KVMemory,
    count_kv,
    fit_kv,
    lay_out,
    least_blocks,
    least_bytes,
)
from headrace.back.runner.pooler import Pooler
from headrace.back.runner.results import LaunchedStep, SampledTokens
from headrace.back.runner.states import STATES
from headrace.back.runner.states.state import ModelState
from headrace.back.runner.steps import StepOutputs, StepResources
from headrace.back.runner.verification import check_groups
from headrace.back.runner.warmup import run_largest, warm_up
from headrace.back.sampling.prompt_logprobs import PromptScorer, Scored
from headrace.back.sampling.sampled import SampledRows
from headrace.back.sampling.sampler import Sampler
from headrace.base.config.resolved import Decision, EngineSpec
from headrace.base.errors import EngineError, HeadraceError
from headrace.base.wire.grammar import GRAMMAR_HOOK, NOTHING
from headrace.base.wire.step import StepPlan, StepResult, WorkerFacts

log = logging.getLogger(__name__)

AwaitDeferred = Callable[[int], dict[str, memoryview]]
"""Waits for the deferred inputs of a step, by its number: payloads by hook name."""


def no_deferred_inputs(step: int) -> dict[str, memoryview]:
    """For callers whose plans defer nothing."""
    raise AssertionError(f"step {step} waits for deferred inputs, but nobody sends them")


def once(await_deferred: AwaitDeferred) -> AwaitDeferred:
    """The same, for a step that may be tried twice: its inputs are sent only once."""
    return functools.cache(await_deferred)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """One rank's share of the engine. Plans must come in order, and at most RING (buckets.py) of
    them before the first one's result is read.

    Invariants: a row's tokens and block tables are what the plans so far have said, plus the tokens
    sampled here; block 0 is never given to a request.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: CausalModel,
        *,
        device: torch.device,
        state: ModelState | None = None,
        steps: StepsFactory = make_steps,
        weight_bytes: int = 0,
        decisions: Sequence[Decision] = (),
        start_s: dict[str, float] | None = None,
        checks: DeferredChecks | None = None,
    ) -> None:
        self._model = model
        layout = lay_out(
            model.kv_forms, block_tokens=spec.kv.block_tokens, dtype=_DTYPES[spec.model.dtype]
        )
        kv = replace(spec.kv, num_blocks=least_blocks(layout)) if spec.kv.fit else spec.kv
        max_rows = spec.scheduler.max_running
        self._kv = KVMemory(layout, count_kv(kv, layout, max_rows=max_rows), device=device)
        self._state = state or STATES[model.state](max_rows, device)
        self._state.use_memory(self._kv)
        self._sampler = Sampler(max_rows=max_rows, logits_width=model.logits_width, device=device)
        self._prompts = PromptScorer(logits_width=model.logits_width, device=device)
        self._pooler = Pooler(model.classify, load_projection(spec.model, device))
        self._captured: LayersOfRow = {}
        self._device = device
        self._lost: deque[np.ndarray] = deque()
        resources = StepResources(
            model=model,
            state=self._state,
            greedy=self._sampler.greedy,
            sample=self._sampler.in_step_sampler,
            kv=self._kv.caches,
            group_of_layer=layout.group_of_cache,
            device=device,
        )
        if spec.speculation is not None:
            check_groups(layout.groups)
        self._steps = steps(resources, spec, num_groups=len(layout.groups))
        spent_s = self._get_ready(spec, layout, checks)
        self.facts = WorkerFacts(
            num_blocks=self._kv.counts.num_blocks,
            block_tokens=spec.kv.block_tokens,
            groups=self._kv.groups,
            logits_width=model.logits_width,
            max_rows=max_rows,
            max_model_len=spec.model.max_model_len,
            generates=model.generates,
            capture_layers=num_capturable(model, spec),
            capture_heads=model.attention_heads,
            max_drafts=self._steps.max_drafts,
            weight_bytes=weight_bytes,
            kv_bytes=self._kv.num_bytes,
            start_s={**(start_s or {}), **spent_s},
            decisions=[
                (d.field, d.requested, d.chosen, d.why)
                for d in (*decisions, *self._sampler.decisions, *self._steps.decisions)
            ],
        )

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
    def max_drafts(self) -> int:
        """See Steps."""
        return self._steps.max_drafts

    @property
    def samples_in_step(self) -> bool:
        """Whether steps sample the tokens of random rows themselves."""
        return bool(self._steps.common_rows) and self._sampler.device_rows is not None

    def _get_ready(
        self, spec: EngineSpec, layout: KVLayout, checks: DeferredChecks | None
    ) -> dict[str, float]:
        """Compiles, makes the self-checks, sizes the KV cache, warms up; the seconds of each."""
        width, began = self._model.logits_width, time.perf_counter()
        if (ahead := self._steps.compiling()) is not None:
            with ahead:
                if checks is not None:
                    checks.compile()
                warm_up(self, spec, width, self._device, compiling=True)
        if checks is not None:
            checks.run()
        compile_s = time.perf_counter() - began
        if spec.kv.fit:
            self._fit(spec, layout)
        profile_s = time.perf_counter() - began - compile_s
        warmup_s = warm_up(self, spec, width, self._device)
        return {"compile": compile_s, "profile": profile_s, "warmup": warmup_s}

    def _fit(self, spec: EngineSpec, layout: KVLayout) -> None:
        """Runs the largest step, then makes the KV cache of what the device has left."""
        assert spec.kv.memory_bytes is not None and spec.device.memory_bytes is not None
        profile = profile_step(
            self._device,
            lambda: run_largest(self, spec, self._model.logits_width, self._device),
        )
        num_bytes = fit_kv(
            profile,
            budget=spec.device.memory_bytes,
            wanted=spec.kv.memory_bytes,
            least=least_bytes(layout, max_rows=spec.scheduler.max_running),
        )
        counts = count_kv(
            replace(spec.kv, memory_bytes=num_bytes), layout, max_rows=spec.scheduler.max_running
        )
        self._kv = KVMemory(layout, counts, device=self._device)
        self._state.use_memory(self._kv)
        self._steps.use_kv(self._kv.caches)

    def release(self) -> None:
        """Gives the KV cache back, whoever still knows of it; nothing may be run afterwards."""
        self._kv.release()

    def execute(self, plan: StepPlan, *, all_hidden: bool = False) -> StepResult:
        """Runs one step to its end; `all_hidden`: as if somebody wanted the hidden states of all
        its tokens, which takes the most memory."""
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
        """Queues one step. Steps may be launched before the results of earlier ones are read.

        `await_deferred` waits for the payloads of the plan's `deferred` inputs; it is called when
        all that does not depend on them is on its way.
        """
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
        needs = "logits" if plan.deferred else self._sampler.needs(plan.rows[plan.sample])
        plan = self._steps.begin(plan, needs)
        shape = dataclasses.replace(shape_of(plan), needs=needs, every=every)
        probe = capture_of(self._captured, shape) if self._captured else None
        outputs = self._steps.run(plan, shape, probe=probe)
        prompts, refused = (
            self._score_prompts(shape, outputs.out.hidden_TE) if self._prompts.rows else ([], {})
        )
        if shape.sampled.size:
            sampled = self._sample(plan, shape, outputs, await_deferred)
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
            captured=() if probe is None else probe.weights,
            refused=refused,
            lost=self._lost.append,
        )

    def _begin(self, plan: StepPlan) -> None:
        if plan.ends.size:
            self._state.end(plan.ends)
            self._sampler.end(plan.ends)
            if self._prompts.rows:
                self._prompts.end(plan.ends)
            if self._pooler.rows:
                self._pooler.end(plan.ends)
            if self._captured:
                forget_rows(self._captured, plan.ends)
        for start in plan.starts:
            self._state.start(start)
            self._sampler.start(start)
            if start.sampling.prompt_logprobs is not None:
                self._prompts.start(start)
            if start.pooling is not None:
                self._pooler.start(start)
            if start.sampling.capture_layers:
                self._captured[start.row] = start.sampling.capture_layers

    def _sample(
        self, plan: StepPlan, shape: StepShape, outputs: StepOutputs, await_deferred: AwaitDeferred
    ) -> SampledTokens:
        """Samples the rows that the plan wants sampled and stores their tokens for the next step,
        unless the step has done so."""
        if (done := outputs.samples) is not None:
            scores, at = done.scores, shape.place
            logprobs = scores and self._sampler.logprobs(scores, shape.sampled_row, at)
            return SampledTokens(
                tokens=done.tokens,
                max_logit=done.max_logit,
                chosen_logit=done.chosen_logit,
                logprobs=logprobs,
                index=at,
            )
        deferred = await_deferred(plan.step) if plan.deferred else {}
        asked: SampledRows = {
            "rows": shape.sampled_row,
            "positions": shape.sampled_position,
            "tokens": self._steps.rows.tokens.data,
        }
        if outputs.out.top_candidates is not None:
            sampled = self._sampler.sample_candidates(
                outputs.best(), lambda at: self._model.logits(outputs.hidden(at)), **asked
            )
        else:
            masks = deferred.get(GRAMMAR_HOOK, NOTHING)
            sampled = self._sampler.sample(*outputs.wanted(), masks=masks, **asked)
        return SampledTokens(
            tokens=self._steps.commit(shape, sampled.token_N, sampled.max_logit_N),
            max_logit=to_host(sampled.max_logit_N).numpy(),
            chosen_logit=None
            if sampled.chosen_logit_N is None
            else to_host(sampled.chosen_logit_N).numpy(),
            logprobs=sampled.logprobs,
        )

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
        before any of these
        blocks can have another owner: a plan that gives them away comes after the result that told
        of the failure."""
        while self._lost:
            tables = self._steps.rows.tables
            with self._steps.scope():
                row_K = to_device(self._lost.popleft(), self._device)
                for group, table in enumerate(tables):
                    blocks = table.data.index_select(0, row_K).unique()
                    self._kv.scrub(group, blocks.to(torch.int64))


def _out_of_memory(
    plan: StepPlan, await_deferred: AwaitDeferred, error: torch.OutOfMemoryError
) -> LaunchedStep:
    """The step's requests fail; the engine goes on."""
    if plan.deferred:
        await_deferred(plan.step)  # the inputs of this step must not reach the next one
    log.error("step %d: out of device memory; its requests fail", plan.step, exc_info=error)
    full = EngineError("the device ran out of memory in this request's step")
    return LaunchedStep(plan=plan, refused=dict.fromkeys(range(plan.rows.size), full))
