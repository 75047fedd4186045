"""How a runner comes to be, in three steps:

    prepare    what it is made of: a frozen RunnerPlan. Where kernels are compiled, a trial runner
               over the smallest KV cache compiles them, its self-checks run, and its largest step
               shows how much memory is left for the KV cache
    construct  runner_of(plan): everything is there, nothing comes later
    warm up    made-up steps (warmup.py), which record those that are replayed

Runners made again over weights that are back (executor/resident.py) go the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch

from headrace.back.kernels.op import DeferredChecks
from headrace.back.layers.moe.routing_tap import RoutingTap
from headrace.back.layers.row_directions import RowDirections
from headrace.back.models.load.dense import load_projection
from headrace.back.models.protocol import CausalModel
from headrace.back.parallel.pipe import Pipe
from headrace.back.runner.devices import StepsFactory, compiles_kernels, make_steps, profile_step
from headrace.back.runner.fit import fit_kv
from headrace.back.runner.hidden_states import HiddenStateFiles
from headrace.back.runner.kv_layout import KVLayout, lay_out
from headrace.back.runner.memory import KVCounts, count_kv, least_blocks, least_bytes
from headrace.back.runner.runner import Runner, RunnerPlan
from headrace.back.runner.stages import runner_of
from headrace.back.runner.states import StateFactory, state_of
from headrace.back.runner.states.encoded_files import EncodedFiles
from headrace.back.runner.states.encoder_cache import FilesFactory
from headrace.back.runner.warmup import run_largest, warm_up
from headrace.back.speculative.network import DraftNetwork
from headrace.base.config.resolved import EngineSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class StartedRunner:
    """A runner that is warm, and the seconds of each part of its start."""

    runner: Runner
    start_s: dict[str, float]


def start_runner(
    spec: EngineSpec,
    model: CausalModel,
    *,
    device: torch.device,
    steps: StepsFactory = make_steps,
    state: StateFactory | None = None,
    checks: DeferredChecks | None = None,
    network: DraftNetwork | None = None,
    routing: RoutingTap | None = None,
    hidden: HiddenStateFiles | None = None,
    directions: RowDirections | None = None,
    pipe: Pipe | None = None,
) -> StartedRunner:
    """Prepares, constructs and warms up. `checks`: self-checks that wait until their kernels have
    been compiled. `pipe`: of a stage among others."""
    seconds = {"compile": 0.0, "profile": 0.0}
    plan = plan_runner(spec, model, device=device, steps=steps, state=state, network=network)
    plan = replace(plan, routing=routing, hidden=hidden, directions=directions, pipe=pipe)
    if compiles_kernels(device):
        plan = _try_out(plan, checks, seconds)
    runner = runner_of(plan)
    seconds["warmup"] = warm_up(runner, spec, model.logits_width, device)
    return StartedRunner(runner=runner, start_s=seconds)


def plan_runner(
    spec: EngineSpec,
    model: CausalModel,
    *,
    device: torch.device,
    steps: StepsFactory = make_steps,
    state: StateFactory | None = None,
    network: DraftNetwork | None = None,
) -> RunnerPlan:
    """What a runner is made of; its KV cache as large as the specification says, or the smallest
    there is, where the specification lets the device decide."""
    own = () if network is None else network.kv_forms
    behind = (replace(form, cache=len(model.kv_forms) + form.cache) for form in own)
    layout = lay_out(
        (*model.kv_forms, *behind),
        block_tokens=spec.kv.block_tokens,
        dtype=_DTYPES[spec.model.dtype],
        order=spec.kv.layout,
    )
    counts = _least(spec, layout) if spec.kv.fit else _count(spec, layout)
    return RunnerPlan(
        spec=spec,
        model=model,
        device=device,
        layout=layout,
        counts=counts,
        projection=load_projection(spec.model, device),
        steps=steps,
        state=state or state_of(model, _encoded_files(spec)),
        network=network,
    )


def _encoded_files(spec: EngineSpec) -> FilesFactory | None:
    files = spec.kv.encoder_files
    return None if files is None else partial(EncodedFiles, files, spec.model)


def foretold(spec: EngineSpec, model: CausalModel) -> tuple[KVLayout, KVCounts]:
    """What a KV memory of the stated size will be cut into, of a model that need not have memory;
    without a drafter's own caches."""
    layout = lay_out(
        model.kv_forms,
        block_tokens=spec.kv.block_tokens,
        dtype=_DTYPES[spec.model.dtype],
        order=spec.kv.layout,
    )
    return layout, _count(spec, layout)


def _count(spec: EngineSpec, layout: KVLayout) -> KVCounts:
    return count_kv(spec.kv, layout, max_rows=spec.scheduler.max_running, drafting=_drafting(spec))


def _drafting(spec: EngineSpec) -> tuple[int, int]:
    """Rows of a step that have drafts, and how many of each."""
    speculation = spec.speculation
    return (0, 0) if speculation is None else (speculation.max_rows, speculation.num_tokens)


def _least(spec: EngineSpec, layout: KVLayout) -> KVCounts:
    kv = msgspec.structs.replace(spec.kv, num_blocks=least_blocks(layout))
    return _count(msgspec.structs.replace(spec, kv=kv), layout)


def _try_out(
    plan: RunnerPlan, checks: DeferredChecks | None, seconds: dict[str, float]
) -> RunnerPlan:
    """The plan once its kernels are compiled and checked, with the KV cache that the device has
    memory for."""
    trial = runner_of(replace(plan, counts=_least(plan.spec, plan.layout)))
    with _timed(seconds, "compile"):
        _compile(trial, plan, checks)
        if checks is not None:
            checks.run()
    if plan.spec.kv.fit:
        with _timed(seconds, "profile"):
            plan = replace(plan, counts=_fit(trial, plan))
    trial.release()
    return plan


def _compile(trial: Runner, plan: RunnerPlan, checks: DeferredChecks | None) -> None:
    """Compiles, many at a time, the kernels that the self-checks and the steps take."""
    compiling = trial.compiling()
    if compiling is None:
        return
    with compiling:
        if checks is not None:
            checks.compile()
        warm_up(trial, plan.spec, plan.model.logits_width, plan.device, compiling=True)


def _fit(trial: Runner, plan: RunnerPlan) -> KVCounts:
    """Runs the largest step; the KV cache that fits into what it leaves."""
    spec, layout = plan.spec, plan.layout
    assert spec.kv.memory_bytes is not None and spec.device.memory_bytes is not None
    profile = profile_step(
        plan.device, lambda: run_largest(trial, spec, plan.model.logits_width, plan.device)
    )
    num_bytes = fit_kv(
        profile,
        budget=spec.device.memory_bytes,
        wanted=spec.kv.memory_bytes,
        least=least_bytes(layout, max_rows=spec.scheduler.max_running, drafting=_drafting(spec)),
    )
    kv = msgspec.structs.replace(spec.kv, memory_bytes=num_bytes)
    return _count(msgspec.structs.replace(spec, kv=kv), layout)


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - began
