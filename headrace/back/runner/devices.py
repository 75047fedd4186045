"""Which way of running steps a device gets: the one place in the runner that looks at the
device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from headrace.back.kernels.native.library import loaded, unsupported
from headrace.back.runner.batch import Rows
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.canvas import CanvasSteps
from headrace.back.runner.cpu_graphs import CpuGraphs, ExactSizes
from headrace.back.runner.cuda_graphs import CudaGraphs
from headrace.back.runner.denoising import DenoisingSteps
from headrace.back.runner.exact_steps import ExactSteps
from headrace.back.runner.fit import Profile
from headrace.back.runner.graph_usage import GraphUsage
from headrace.back.runner.replay import Replay
from headrace.back.runner.sizes import Buckets, SizesFactory
from headrace.back.runner.steps import StepResources, Steps
from headrace.back.runner.unrecorded import Unrecorded
from headrace.back.speculative import text_drafter
from headrace.back.speculative.draft_tokens import DraftSampling
from headrace.back.speculative.drafter import Drafter
from headrace.back.speculative.network import NetworkDrafter, NetworkPlace
from headrace.base.config.resolved import EngineSpec, SpeculationSpec, max_forward_tokens


class StepsFactory(Protocol):
    """Makes the `Steps` of a runner."""

    def __call__(self, resources: StepResources, spec: EngineSpec, *, num_groups: int) -> Steps: ...


def make_steps(resources: StepResources, spec: EngineSpec, *, num_groups: int) -> Steps:
    """Replayed graphs on CUDA and recorded native calls on a CPU, where everything a step does is
    on the device; exact steps elsewhere. Of a model that writes blocks, those that denoise them."""
    if spec.denoising is not None:
        rows = _growing_rows(resources, spec, num_groups=num_groups)
        tokens = spec.scheduler.max_step_tokens
        kind = CanvasSteps if spec.denoising.canvas else DenoisingSteps
        return kind(resources, rows, spec.denoising, max_tokens=tokens)
    why = why_exact(resources)
    if why is not None:
        return exact_steps(resources, spec, why, num_groups=num_groups)
    on_cpu = resources.device.type == "cpu"
    replay: Replay = CpuGraphs(loaded()) if on_cpu else CudaGraphs(resources.device, compiling)
    if not spec.device.records:
        replay = Unrecorded(replay, "--enforce-eager: each step is called")
    sizes = ExactSizes if on_cpu else Buckets
    return bucket_steps(resources, spec, replay, num_groups=num_groups, sizes=sizes)


def exact_steps(
    resources: StepResources, spec: EngineSpec, why: str, *, num_groups: int
) -> ExactSteps:
    """Steps of their own size, and why."""
    return ExactSteps(resources, _growing_rows(resources, spec, num_groups=num_groups), why)


def _growing_rows(resources: StepResources, spec: EngineSpec, *, num_groups: int) -> Rows:
    return Rows.growing(
        max_rows=spec.scheduler.max_running,
        num_groups=num_groups,
        block_tokens=spec.kv.block_tokens,
        device=resources.device,
        groups=resources.groups,
    )


def bucket_steps(
    resources: StepResources,
    spec: EngineSpec,
    replay: Replay,
    *,
    num_groups: int,
    sizes: SizesFactory = Buckets,
    kind: type[BucketSteps] = BucketSteps,
) -> BucketSteps:
    """Steps by buckets, replayed as `replay` does."""
    speculation = spec.speculation
    drafter = None if speculation is None else _drafter(speculation, resources, spec)
    return kind(
        resources if speculation is None else replace(resources, rates=speculation.rates),
        replay,
        sizes=sizes,
        num_groups=num_groups,
        block_tokens=spec.kv.block_tokens,
        max_rows=spec.scheduler.max_running,
        max_tokens=max_forward_tokens(spec),
        max_model_len=spec.model.max_model_len,
        drafter=drafter,
        draft_rows=0 if speculation is None else speculation.max_rows,
        usage=GraphUsage.of(spec, resources.device),
    )


def _drafter(speculation: SpeculationSpec, resources: StepResources, spec: EngineSpec) -> Drafter:
    network = resources.network
    if network is None:
        return text_drafter(speculation, resources.device)
    place = NetworkPlace(
        kv=resources.kv,
        group_of_cache=resources.group_of_layer,
        model_caches=resources.model_caches,
        block_tokens=spec.kv.block_tokens,
        max_rows=spec.scheduler.max_running,
        max_tokens=max_forward_tokens(spec),
        device=resources.device,
        sampling=_draft_sampling(resources) if speculation.sampled else None,
    )
    return NetworkDrafter(network, place, max_drafts=speculation.num_tokens)


def _draft_sampling(resources: StepResources) -> DraftSampling:
    assert resources.sampler is not None
    vocabulary = resources.model.logits_width
    return DraftSampling(table=resources.sampler.table, vocabulary=vocabulary)


def compiles_kernels(device: torch.device) -> bool:
    """Whether kernels are compiled when they are needed, and a step's memory must be measured."""
    return device.type == "cuda"


def compiling() -> AbstractContextManager[object]:
    """Kernels are compiled and not launched; see kernels/triton/ahead.py."""
    try:
        from headrace.back.kernels.triton.ahead import compiling as triton_compiling
    except ImportError:
        return nullcontext()
    return triton_compiling()


def profile_step(device: torch.device, step: Callable[[], None]) -> Profile:
    """Runs the largest step and says what it took."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return Profile(held=held, step=peak - held, free=free)


def why_exact(resources: StepResources) -> str | None:
    """Why steps are of their own size and not of few; None: they are of few."""
    if resources.device.type not in ("cuda", "cpu"):
        return f"{resources.device.type} has none"
    if resources.device.type == "cpu" and (reason := unsupported("cpu", torch.float32)):
        return reason
    if not resources.model.generates:
        return "a model without a language-model head samples nothing"
    if not resources.state.in_graphs:
        return "this kind of model needs the host in every step"
    if resources.model.host_kernels:
        return f"{resources.model.host_kernels[0]} needs the host in every step"
    return None
