"""The start of a runner: prepared, constructed, warmed up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from headrace.back.runner import stages, start
from headrace.back.runner.exact_steps import ExactSteps
from headrace.back.runner.fit import GRAPH_BYTES, Profile
from headrace.back.runner.memory import least_blocks
from headrace.back.runner.runner import Runner, RunnerPlan
from headrace.back.runner.start import plan_runner, start_runner
from headrace.base.config.resolved import EngineSpec
from tests.back.driver import Driver, greedy_reference
from tests.back.tiny_model import TinyModel, tiny_spec

CPU = torch.device("cpu")
KV_BYTES = 1 << 20


def fitted_spec() -> EngineSpec:
    """Of an engine whose device says how large the KV cache becomes."""
    spec = tiny_spec()
    kv = msgspec.structs.replace(spec.kv, num_blocks=None, memory_bytes=1 << 40, fit=True)
    device = msgspec.structs.replace(spec.device, memory_bytes=1 << 40)
    return msgspec.structs.replace(spec, kv=kv, device=device)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that compiles kernels and whose memory is measured; what happened on it."""
    events: list[str] = []
    runners: list[weakref.ref[Runner]] = []

    @contextmanager
    def compiling(self: ExactSteps) -> Iterator[None]:
        events.append("compile")
        yield

    def profile(device: torch.device, step: Callable[[], None]) -> Profile:
        step()
        events.append("profile")
        return Profile(held=0, step=0, free=KV_BYTES + GRAPH_BYTES)

    class Watched(Runner):
        def __init__(self, plan: RunnerPlan) -> None:
            super().__init__(plan)
            events.append(f"construct beside {sum(one() is not None for one in runners)}")
            runners.append(weakref.ref(self))

    monkeypatch.setattr(start, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(start, "profile_step", profile)
    monkeypatch.setattr(stages, "Runner", Watched)
    monkeypatch.setattr(ExactSteps, "compiling", compiling)
    return events


def test_a_trial_compiles_and_measures_and_leaves_its_memory_to_the_runner(
    trials: list[str],
) -> None:
    """The runner is constructed once the trial is gone: their tables never lie side by side."""
    model = TinyModel()
    gc.disable()
    try:
        started = start_runner(fitted_spec(), model, device=CPU)
    finally:
        gc.enable()
    assert trials == ["construct beside 0", "compile", "profile", "construct beside 0"]
    assert set(started.start_s) == {"compile", "profile", "warmup"}
    facts = started.runner.facts
    assert facts.kv_bytes <= KV_BYTES < facts.kv_bytes * (facts.num_blocks + 1) / facts.num_blocks
    driver = Driver(facts)
    row = driver.add([5, 6, 7])
    driver.read(started.runner.execute(driver.plan([(row, 3)])))
    assert row.outputs == greedy_reference(model, [5, 6, 7], 1)


def test_a_plan_without_a_measured_device_has_the_smallest_cache() -> None:
    spec = fitted_spec()
    plan = plan_runner(spec, TinyModel(), device=CPU)
    assert plan.counts.num_blocks == least_blocks(plan.layout)
    assert plan_runner(tiny_spec(num_blocks=9), TinyModel(), device=CPU).counts.num_blocks == 9
