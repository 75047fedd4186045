"""Which way of running steps a device gets: the one place in the runner that looks at the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from headrace.back.kernels.native.wrap import loaded, unsupported
from headrace.back.runner.buckets import Buckets, BucketSteps, MakeSizes, Replay
from headrace.back.runner.graphs import Graphs
from headrace.back.runner.memory import Profile
from headrace.back.runner.requests import Rows
from headrace.back.runner.steps import ExactSteps, Machine, Steps
from headrace.back.runner.tapes import ExactSizes, Tapes
from headrace.base.config.resolved import EngineSpec


class MakeSteps(Protocol):
    """Makes the `Steps` of a runner."""

    def __call__(self, machine: Machine, spec: EngineSpec, *, num_groups: int) -> Steps: ...


def make_steps(machine: Machine, spec: EngineSpec, *, num_groups: int) -> Steps:
    """Replayed graphs on CUDA and recorded native calls on a CPU, where everything a step does is on the device; exact
    steps elsewhere."""
    why = _why_exact(machine)
    if why is not None:
        rows = Rows.growing(
            max_rows=spec.scheduler.max_running,
            num_groups=num_groups,
            block_tokens=spec.kv.block_tokens,
            device=machine.device,
        )
        return ExactSteps(machine, rows, why)
    if machine.device.type == "cpu":
        return bucket_steps(machine, spec, Tapes(loaded()), num_groups=num_groups, sizes=ExactSizes)
    return bucket_steps(machine, spec, Graphs(machine.device, compiling), num_groups=num_groups)


def bucket_steps(
    machine: Machine,
    spec: EngineSpec,
    replay: Replay,
    *,
    num_groups: int,
    sizes: MakeSizes = Buckets,
) -> BucketSteps:
    """Steps by buckets, replayed as `replay` does."""
    return BucketSteps(
        machine,
        replay,
        sizes=sizes,
        num_groups=num_groups,
        block_tokens=spec.kv.block_tokens,
        max_rows=spec.scheduler.max_running,
        max_tokens=spec.scheduler.max_step_tokens,
        max_model_len=spec.model.max_model_len,
    )


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


def _why_exact(machine: Machine) -> str | None:
    if machine.device.type not in ("cuda", "cpu"):
        return f"{machine.device.type} has none"
    if machine.device.type == "cpu" and (reason := unsupported("cpu", torch.float32)):
        return reason
    if not machine.state.in_graphs:
        return "this kind of model needs the host in every step"
    if machine.model.host_kernels:
        return f"{machine.model.host_kernels[0]} needs the host in every step"
    return None
