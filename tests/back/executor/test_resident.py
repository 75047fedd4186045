"""What every worker sets up before it loads a model, and how the model is built on a GPU."""

from __future__ import annotations

import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.back.executor.resident import checked, set_threads
from headrace.back.kernels.native.build import build
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.op import DeferredChecks, Kernel, Op, Sample, SelfCheckFailed
from headrace.base.config.resolved import DeviceSpec


def test_torch_and_the_native_kernels_get_the_workers_threads() -> None:
    built = NativeLibrary(build(here=True))
    before = torch.get_num_threads()
    load.cache_clear()
    set_threads(DeviceSpec(device="cpu", executor="inline", threads=3))
    assert torch.get_num_threads() == built.threads == 3
    set_threads(DeviceSpec(device="cpu", executor="inline", threads=1))
    assert torch.get_num_threads() == built.threads == 1
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_the_worker_and_its_helpers_keep_to_their_cpus() -> None:
    """PLT-11: seen where the system shows it, in each thread's status."""
    cpu = max(os.sched_getaffinity(0))
    NativeLibrary(build(here=True))

    def masks() -> list[str]:
        before = {path.name for path in Path("/proc/self/task").iterdir()}
        set_threads(DeviceSpec(device="cpu", executor="inline", threads=2, cpus=(cpu, cpu)))
        mine = str(threading.get_native_id())
        new = {path.name for path in Path("/proc/self/task").iterdir()} - before
        texts = [Path(f"/proc/self/task/{name}/status").read_text() for name in {mine, *new}]
        return [re.search(r"Cpus_allowed_list:\s*(\S+)", text)[1] for text in texts]

    load.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(masks).result()
        pool.submit(set_threads, DeviceSpec(device="cpu", executor="inline")).result()
    assert found == [str(cpu)] * 2


def test_after_failed_self_checks_the_model_is_built_again_and_at_last_each_decides() -> None:
    """REG-121: on a GPU checks are deferred until all kernels are compiled; a kernel that fails one
    then is not used."""
    tried: list[DeferredChecks | None] = []

    def build(checks: DeferredChecks | None = None) -> Any:
        tried.append(checks)
        if checks is not None:
            raise SelfCheckFailed
        return "built"

    assert checked(build) == "built"
    assert all(isinstance(one, DeferredChecks) for one in tried[:-1]) and tried[-1] is None
    with DeferredChecks():
        pass  # none is entered any more


def op_with(run: Any) -> Op[int]:
    module = ModuleType("headrace_test_worker_kernel")
    module.__dict__["KERNEL"] = Kernel(name="fast", supports=lambda _: None, bind=lambda _: run)
    sys.modules[module.__name__] = module
    return Op(
        name="double",
        reference=Kernel(name="torch", supports=lambda _: None, bind=lambda _: lambda x: 2 * x),
        kernels=[f"{module.__name__}:KERNEL"],
        sample=lambda problem: Sample(problem=problem, weights=(), arguments=(torch.ones(2),)),
        tolerance=lambda problem: 1e-6,
    )


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("does not compile")


def test_a_build_that_a_broken_kernel_ends_is_made_again_without_it() -> None:
    op, kernels = op_with(fails), []

    def build(checks: DeferredChecks | None) -> str:
        choice = op.choose(3)
        kernels.append(choice.kernel.name)
        choice.bind()(torch.ones(2))
        return "built"

    assert checked(build) == "built" and kernels == ["fast", "torch"]
    assert "does not compile" in op.choose(3).rejected[0][1]


def test_a_build_that_ends_for_another_reason_ends_the_start() -> None:
    op = op_with(lambda x: 2 * x)

    def build(checks: DeferredChecks | None) -> str:
        op.choose(3)
        raise ValueError("the model is wrong")

    with pytest.raises(ValueError, match="the model is wrong"):
        checked(build)
