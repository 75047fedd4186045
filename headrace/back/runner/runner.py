"""Runs steps on one rank: plan -> rows -> batch -> model -> sampler -> result. Knows no model family and no device.

The runner owns what outlives a step: the KV memory, the sampler's state and the model's `ModelState`; the rows belong
to `Steps`, which says how a step is run on this device. `launch` returns once everything is queued, `Launched.result`
waits for it. There is one execute path; warm-up, memory profile and self-check go through it with made-up plans
(warmup.py).

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

from headrace.back.kernels.op import PutOff
from headrace.back.kernels.upload import to_device, to_host
from headrace.back.models.load.dense import load_projection
from headrace.back.models.protocol import CausalModel
from headrace.back.runner.batch import StepShape, shape_of
from headrace.back.runner.capture import LayersOfRow, forget_rows, num_capturable, tap_of
from headrace.back.runner.devices import MakeSteps, make_steps, profile_step
from headrace.back.runner.memory import KVLayout, KVMemory, count_blocks, fit_kv, lay_out
from headrace.back.runner.pooler import Pooler
from headrace.back.runner.results import Draws, Launched
from headrace.back.runner.states import STATES
from headrace.back.runner.states.state import ModelState
from headrace.back.runner.steps import Machine, Ran
from headrace.back.runner.warmup import run_largest, warm_up
from headrace.back.sampling.prompt_logprobs import PromptScorer, Scored
from headrace.back.sampling.sampler import SampledRows, Sampler
from headrace.base.config.resolved import Decision, EngineSpec
from headrace.base.errors import EngineError, HeadraceError
from headrace.base.wire.grammar import GATE, NOTHING
from headrace.base.wire.step import StepPlan, StepResult, WorkerFacts

log = logging.getLogger(__name__)

Supplied = Callable[[int], dict[str, memoryview]]
"""From the number of a step to its late payloads."""


def no_supply(step: int) -> dict[str, memoryview]:
    """For callers whose plans have no late gates."""
    raise AssertionError(f"step {step} waits for gates, but nobody supplies them")


def once(supplied: Supplied) -> Supplied:
    """The same, for a step that may be tried twice: it is supplied only once."""
    return functools.cache(supplied)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """One rank's share of the engine. Plans must come in order, and at most RING (buckets.py) of them before the first
    one's result is read.

    Invariants: a row's tokens and block tables are what the plans so far have said, plus the tokens sampled here;
    block 0 is never given to a request.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: CausalModel,
        *,
        device: torch.device,
        state: ModelState | None = None,
        steps: MakeSteps = make_steps,
        weight_bytes: int = 0,
        decisions: Sequence[Decision] = (),
        start_s: dict[str, float] | None = None,
        checks: PutOff | None = None,
    ) -> None:
        self._model = model
        layout = lay_out(
            model.kv_layers, block_tokens=spec.kv.block_tokens, dtype=_DTYPES[spec.model.dtype]
        )
        kv = replace(spec.kv, num_blocks=1 + len(layout.groups)) if spec.kv.fit else spec.kv
        num_blocks = count_blocks(kv, layout)
        self._kv = KVMemory(model.kv_layers, layout, num_blocks=num_blocks, device=device)
        groups = layout.group_of_layer
        max_rows = spec.scheduler.max_running
        self._state = state or STATES[model.state](max_rows, device)
        self._sampler = Sampler(max_rows=max_rows, logits_width=model.logits_width, device=device)
        self._prompts = PromptScorer(logits_width=model.logits_width, device=device)
        self._pooler = Pooler(model.classify, load_projection(spec.model, device))
        self._captured: LayersOfRow = {}
        self._device = device
        self._lost: deque[np.ndarray] = deque()
        self._every = False
        machine = Machine(
            model=model,
            state=self._state,
            greedy=self._sampler.greedy,
            draw=self._sampler.in_step,
            kv=self._kv.layers,
            group_of_layer=tuple(groups[layer] for layer in range(len(groups))),
            device=device,
        )
        self._steps = steps(machine, spec, num_groups=len(layout.groups))
        num_blocks, spent_s = self._get_ready(spec, layout, num_blocks, checks)
        self.facts = WorkerFacts(
            num_blocks=num_blocks,
            block_tokens=spec.kv.block_tokens,
            groups=layout.groups,
            logits_width=model.logits_width,
            max_rows=max_rows,
            max_model_len=spec.model.max_model_len,
            generates=model.generates,
            capture_layers=num_capturable(model, spec),
            capture_heads=model.attention_heads,
            weight_bytes=weight_bytes,
            kv_bytes=self._kv.num_bytes,
            start_s={**(start_s or {}), **spent_s},
            decisions=[
                (d.field, d.given, d.chosen, d.why)
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
    def draws(self) -> bool:
        """Whether steps draw the tokens of random rows themselves."""
        return bool(self._steps.common_rows) and self._sampler.drawn is not None

    def _get_ready(
        self, spec: EngineSpec, layout: KVLayout, num_blocks: int, checks: PutOff | None
    ) -> tuple[int, dict[str, float]]:
        """Compiles, makes the self-checks, sizes the KV cache, warms up; the number of blocks, and the seconds of
        each."""
        width, began = self._model.logits_width, time.perf_counter()
        if (ahead := self._steps.compiling()) is not None:
            with ahead:
                if checks is not None:
                    checks.ask()
                warm_up(self, spec, width, self._device, compiling=True)
        if checks is not None:
            checks.make()
        compile_s = time.perf_counter() - began
        if spec.kv.fit:
            num_blocks = self._fit(spec, layout)
        profile_s = time.perf_counter() - began - compile_s
        warmup_s = warm_up(self, spec, width, self._device)
        return num_blocks, {"compile": compile_s, "profile": profile_s, "warmup": warmup_s}

    def _fit(self, spec: EngineSpec, layout: KVLayout) -> int:
        """Runs the largest step, then makes the KV cache of what the device has left; the number of blocks."""
        assert spec.kv.memory_bytes is not None and spec.device.memory_bytes is not None
        self._every = True  # what takes the most memory
        profile = profile_step(
            self._device,
            lambda: run_largest(self, spec, self._model.logits_width, self._device),
        )
        self._every = False
        num_bytes = fit_kv(
            profile,
            budget=spec.device.memory_bytes,
            wanted=spec.kv.memory_bytes,
            least=(1 + len(layout.groups)) * layout.block_bytes,
        )
        num_blocks = count_blocks(replace(spec.kv, memory_bytes=num_bytes), layout)
        self._kv = KVMemory(
            self._model.kv_layers, layout, num_blocks=num_blocks, device=self._device
        )
        self._steps.use_kv(self._kv.layers)
        return num_blocks

    def release(self) -> None:
        """Gives the KV cache back, whoever still knows of it; nothing may be run afterwards."""
        self._kv.release()

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end."""
        result = self.launch(plan).result()
        self._settle()
        return result

    @torch.inference_mode()
    def launch(self, plan: StepPlan, supplied: Supplied = no_supply) -> Launched:
        """Queues one step. Steps may be launched before the results of earlier ones are read.

        `supplied` waits for the payloads of the plan's `late` gates; it is called when all that does not depend on them
        is on its way.
        """
        with self._steps.scope():
            return self._launch(plan, supplied)

    def _launch(self, plan: StepPlan, supplied: Supplied) -> Launched:
        self._settle()
        self._begin(plan)
        if not plan.rows.size:
            self._steps.rows.apply(plan)
            return Launched(plan=plan)
        shape, supplied = shape_of(plan), once(supplied) if plan.late else supplied
        try:
            return self._run(plan, shape, supplied)
        except torch.OutOfMemoryError:
            log.warning(
                "step %d: out of device memory; trying again with the cache emptied", plan.step
            )
            torch.cuda.empty_cache()
        try:
            return self._run(plan, shape, supplied)
        except torch.OutOfMemoryError as error:
            if plan.late:
                supplied(plan.step)  # what is supplied for this step must not reach the next one
            log.error("step %d: out of device memory; its requests fail", plan.step, exc_info=error)
            full = EngineError("the device ran out of memory in this request's step")
            return Launched(plan=plan, refused=dict.fromkeys(range(plan.rows.size), full))

    def _run(self, plan: StepPlan, shape: StepShape, supplied: Supplied) -> Launched:
        every = self._every or not (self._prompts.idle and self._pooler.idle)
        needs = "logits" if plan.late else self._sampler.needs(shape.sampled_row)
        shape = dataclasses.replace(shape, needs=needs, every=every)
        tap = tap_of(self._captured, shape) if self._captured else None
        ran = self._steps.run(plan, shape, tap=tap)
        prompts, refused = (
            ([], {}) if self._prompts.idle else self._score_prompts(shape, ran.out.hidden_TE)
        )
        if shape.sampled.size:
            sampled = self._draw(plan, shape, ran, supplied)
        else:
            sampled = None
            if plan.late:
                supplied(plan.step)
        return Launched(
            plan=plan,
            moment=self._steps.moment(),
            shape=shape,
            draws=sampled,
            prompts=prompts,
            pooled=() if self._pooler.idle else self._pooler.pool(shape, ran.out.hidden_TE),
            captured=() if tap is None else tap.pieces,
            refused=refused,
            lost=self._lost.append,
        )

    def _begin(self, plan: StepPlan) -> None:
        if plan.ends.size:
            self._state.end(plan.ends)
            self._sampler.end(plan.ends)
            if not self._prompts.idle:
                self._prompts.end(plan.ends)
            if not self._pooler.idle:
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

    def _draw(self, plan: StepPlan, shape: StepShape, ran: Ran, supplied: Supplied) -> Draws:
        """Samples the rows that the plan wants sampled and stores their tokens for the next step, unless the step has
        done so."""
        if (done := ran.told) is not None:
            scores, at = done.scores, shape.sampled
            told = scores and self._sampler.told(scores, shape.sampled_row, at)
            return Draws(tokens=done.tokens, best=done.best, left=done.left, told=told, index=at)
        late = supplied(plan.step) if plan.late else {}
        rows = self._steps.rows.tokens
        asked: SampledRows = {
            "rows": shape.sampled_row,
            "positions": shape.sampled_position,
            "tokens": rows.data,
        }
        if ran.out.tops is not None:
            sampled = self._sampler.sample_tops(
                ran.best(), lambda at: self._model.logits(ran.hidden(at)), **asked
            )
        else:
            masks = late.get(GATE, NOTHING)
            sampled = self._sampler.sample(*ran.wanted(), masks=masks, **asked)
        token_N = sampled.token_N.to(torch.int32)
        rows.put(shape.sampled_row, shape.sampled_position, token_N)
        return Draws(
            tokens=to_host(token_N).numpy(),
            best=to_host(sampled.best_N).numpy(),
            left=None if sampled.left_N is None else to_host(sampled.left_N).numpy(),
            told=sampled.told,
        )

    def _score_prompts(
        self, shape: StepShape, hidden_TE: torch.Tensor
    ) -> tuple[list[tuple[int, Scored]], dict[int, HeadraceError]]:
        """The prompt log-probabilities this step gives, and the rows refused, by index into the plan's rows."""
        found, refused = [], {}
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
                found.append((index, scores))
        return found, refused

    def _settle(self) -> None:
        if self._lost:
            self._clean()

    @torch.inference_mode()
    def _clean(self) -> None:
        """Removes NaN and Inf from the blocks of rows that have failed, the null block included, before any of these
        blocks can have another owner: a plan that gives them away comes after the result that told of the failure."""
        while self._lost:
            tables = self._steps.rows.tables
            with self._steps.scope():
                row_K = to_device(self._lost.popleft(), self._device)
                blocks = [table.data.index_select(0, row_K).view(-1) for table in tables]
                self._kv.scrub(torch.cat(blocks).unique().to(torch.int64))
