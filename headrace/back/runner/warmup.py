"""The first steps, made up: they touch the memory that a real step will touch and check that the
model is sane.

They go through `Runner.execute` like every other step; their KV goes to block SHARED, all rows'
alike. Not to the null
block: padding is written there, whatever it holds, so that nothing may be read from it.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from headrace.back.runner.warmup_media import media_plans, under_way
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import CheckpointError, from_wire
from headrace.base.wire.media import MediaForm
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart, StepPlan, StepResult

CPU_TOKENS = 16
"""Prompt of the warm-up on a CPU, one row: there is no memory to profile and nothing to compile,
each step costs a read of all weights, and whoever starts waits for it. Decodes of more rows are
recorded when they come."""


SHARED = 1
"""There is always such a block: a cache has one for each group, and the null block."""
GREEDY = RowSampling(temperature=0.0)
RANDOM = RowSampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)


class PlanRunner(Protocol):
    """What runs a plan."""

    @property
    def num_groups(self) -> int:
        """Groups of KV blocks."""
        ...

    @property
    def media(self) -> tuple[MediaForm, ...]:
        """The kinds of input beside text."""
        ...

    @property
    def common_rows(self) -> tuple[int, ...]:
        """See Steps."""
        ...

    @property
    def distinct_rows(self) -> tuple[int, ...]:
        """See Steps."""
        ...

    @property
    def samples_in_step(self) -> bool:
        """Whether steps sample the tokens of random rows themselves."""
        ...

    @property
    def adapts(self) -> bool:
        """Whether rows may have adapters."""
        ...

    @property
    def max_drafts(self) -> int:
        """See Steps."""
        ...

    def execute(self, plan: StepPlan, *, all_hidden: bool = False) -> StepResult:
        """Runs one step; `all_hidden`: as if the hidden states of all its tokens were wanted."""
        ...


def warm_up(
    runner: PlanRunner,
    spec: EngineSpec,
    logits_width: int,
    device: torch.device,
    *,
    compiling: bool = False,
) -> float:
    """Runs one prefill and one decode step of the largest size, then the sizes of decode that are
    common, twice: where steps are recorded, the second one is; and those of powers of two that
    verify drafts, with few and with many drafts. Again with random rows, where those are steps of
    their own, in powers of two (others are recorded when they come). Returns the
    seconds. `compiling`: nothing is computed, so the sizes that take all kernels between them,
    once, are enough, and what comes out means nothing; so they are where weights are streamed from
    host memory in every step, twice.

    Raises CheckpointError if the model's logits are not finite.
    """
    began = time.perf_counter()
    num_rows, length = _largest(spec, device)
    generates = spec.model.head == "lm"
    for sampling in (GREEDY, *((RANDOM,) if generates and runner.samples_in_step else ())):
        every = sampling is GREEDY and not compiling and spec.model.offload is None
        common = runner.common_rows if every else runner.distinct_rows
        if sampling is RANDOM:
            common = tuple(rows for rows in common if not rows & (rows - 1))
        again = 1 if compiling else 2
        sizes = [rows for rows in common if rows <= num_rows for _ in range(again)] or [num_rows]
        decodes = [_decode(rows, length) for rows in sizes]
        for rows in sorted({rows for rows in sizes if common and not rows & (rows - 1)}):
            verifying = _verify(runner, spec, rows, length)
            decodes += again * (verifying if compiling or sampling is GREEDY else verifying[-1:])
        prompt = _prompt(length, logits_width)
        columns = runner.num_groups, 1 + length // spec.kv.block_tokens
        prefill = _prefill(
            num_rows, prompt, generates=generates, columns=columns, sampling=sampling
        )
        plans = [prefill, *(decodes if generates else ()), _end(num_rows)]
        results = [runner.execute(plan) for plan in plans]
        if not compiling:
            _check(spec, results)
    if runner.adapts and device.type != "cpu":
        _compile_adapters(runner, spec, logits_width, device)
    _see(runner, spec, device, length)
    return time.perf_counter() - began


def _compile_adapters(
    runner: PlanRunner, spec: EngineSpec, logits_width: int, device: torch.device
) -> None:
    """A prompt and a decode in the first slot, which is empty: the kernels of adapters."""
    num_rows, length = _largest(spec, device)
    columns = runner.num_groups, 1 + length // spec.kv.block_tokens
    prompt, generates = _prompt(length, logits_width), spec.model.head == "lm"
    prefill = _prefill(num_rows, prompt, generates=generates, columns=columns)
    starts = [replace(start, adapter_slot=1) for start in prefill.starts]
    runner.execute(replace(prefill, starts=starts))
    if generates:
        runner.execute(_decode(num_rows, length))
    runner.execute(_end(num_rows))


def _see(runner: PlanRunner, spec: EngineSpec, device: torch.device, length: int) -> None:
    """A prompt with the largest input of each kind beside text."""
    small = device.type == "cpu"
    tokens = length if small else _tokens(spec)
    for plan in media_plans(
        runner.media,
        tokens=tokens,
        num_groups=runner.num_groups,
        block_tokens=spec.kv.block_tokens,
        small=small,
        generates=spec.model.head == "lm",
        before_decoder=bool(spec.model.encoder_tokens),
    ):
        runner.execute(plan)


def _tokens(spec: EngineSpec) -> int:
    """Of a made-up input."""
    if spec.model.encoder_tokens:
        return min(spec.scheduler.max_step_tokens, spec.model.encoder_tokens)
    return min(spec.scheduler.max_step_tokens, spec.model.max_model_len - 1)


def run_largest(
    runner: PlanRunner, spec: EngineSpec, logits_width: int, device: torch.device
) -> None:
    """The step that takes the most memory, alone but for an encoder's pass that rests."""
    num_rows, length = _largest(spec, device)
    generates = spec.model.head == "lm"
    columns = runner.num_groups, 1 + length // spec.kv.block_tokens
    prompt = _prompt(length, logits_width)
    prefill = _prefill(num_rows, prompt, generates=generates, columns=columns)
    prefill = replace(prefill, hook_payloads=under_way(runner.media, _tokens(spec)))
    results = [runner.execute(prefill, all_hidden=True)]
    if spec.speculation is not None:
        rows = min(num_rows, spec.speculation.max_rows)
        results += [runner.execute(plan) for plan in _verify(runner, spec, rows, length)[-1:]]
    _check(spec, [*results, runner.execute(_end(num_rows))])
    _see(runner, spec, device, length)


def _largest(spec: EngineSpec, device: torch.device) -> tuple[int, int]:
    """Rows, and tokens of each."""
    tokens = spec.scheduler.max_step_tokens
    if device.type == "cpu":
        return 1, min(tokens, CPU_TOKENS, spec.model.max_model_len - 1)
    num_rows = min(spec.scheduler.max_running, tokens)
    return num_rows, min(tokens // num_rows, spec.model.max_model_len - 1)


def _prompt(length: int, logits_width: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32) % logits_width


def _check(spec: EngineSpec, results: list[StepResult]) -> None:
    for result in results:
        if result.failed:
            raise CheckpointError(
                "the model's logits for a made-up prompt are not finite: the checkpoint is damaged, or its values do "
                f"not fit {spec.model.dtype} ({from_wire(result.failed[0][1]).message})"
            )


def _prefill(
    num_rows: int,
    prompt: np.ndarray,
    *,
    generates: bool,
    columns: tuple[int, int],
    sampling: RowSampling = GREEDY,
) -> StepPlan:
    """Its last tokens are sampled; those of a model without a language-model head are pooled.
    `columns`: groups, and blocks of a row in each."""
    starts = [
        RowStart(
            row=row,
            request=-1,
            tokens=prompt,
            num_prompt=prompt.size,
            num_computed=0,
            sampling=sampling,
            pooling=None if generates else RowPooling(),
        )
        for row in range(num_rows)
    ]
    plan = _plan(num_rows, starts=starts, num_tokens=prompt.size, num_computed=0, sample=generates)
    group, row, index = (
        place.ravel().astype(np.int32) for place in np.indices((columns[0], num_rows, columns[1]))
    )
    shared = np.full(group.size, SHARED, np.int32)
    return replace(plan, block_group=group, block_row=row, block_index=index, block_id=shared)


def _decode(num_rows: int, length: int) -> StepPlan:
    return _plan(num_rows, starts=[], num_tokens=1, num_computed=length)


def _verify(runner: PlanRunner, spec: EngineSpec, num_rows: int, length: int) -> list[StepPlan]:
    """Steps whose rows all verify drafts, so many that they have 2, 4, 8 ... query tokens, last as
    many as they can; none where the rows are too many for drafts, or too short."""
    most, speculation = runner.max_drafts, spec.speculation
    if speculation is None or not most or num_rows > speculation.max_rows:
        return []
    if length + 1 + most > spec.model.max_model_len:
        return []
    counts = [*(queries - 1 for queries in (2, 4, 8, 16) if queries - 1 < most), most]
    plans = {
        drafts: _plan(num_rows, starts=[], num_tokens=1 + drafts, num_computed=length)
        for drafts in counts
    }
    return [
        replace(plan, drafts=np.full(num_rows, drafts, np.int32)) for drafts, plan in plans.items()
    ]


def _plan(
    num_rows: int,
    *,
    starts: list[RowStart],
    num_tokens: int,
    num_computed: int,
    sample: bool = True,
) -> StepPlan:
    none = np.empty(0, np.int32)
    return StepPlan(
        step=-1,
        ends=none,
        starts=starts,
        block_group=none,
        block_row=none,
        block_index=none,
        block_id=none,
        rows=np.arange(num_rows, dtype=np.int32),
        num_tokens=np.full(num_rows, num_tokens, np.int32),
        num_computed=np.full(num_rows, num_computed, np.int32),
        sample=np.full(num_rows, sample, np.bool_),
    )


def _end(num_rows: int) -> StepPlan:
    plan = _plan(0, starts=[], num_tokens=1, num_computed=0)
    return replace(plan, ends=np.arange(num_rows, dtype=np.int32))
