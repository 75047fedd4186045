"""Drafts that stand by a stated rate (SPC-06: synthetic)."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.tree import (
    DeviceOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)


@pytest.mark.parametrize(
    ("rates", "least", "most"),
    [((1.0, 1.0), 2.0, 2.0), ((0.0, 0.0), 0.0, 0.0), ((0.8, 0.4), 0.9, 1.5)],
)
def test_drafts_stand_as_often_as_is_said(
    rates: tuple[float, ...], least: float, most: float
) -> None:
    """The mean of drafts that stand in a step: 1.2 for 0.8 and 0.4. The drafter's own are poor."""
    speculation = SpeculationOptions(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_min=1,
        adaptive=False,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
    )
    tree = Options(
        device=DeviceOptions(device="cpu", enforce_eager=True),
        model=ModelOptions(max_model_len=256),
        scheduler=SchedulerOptions(max_running=4, speculative_config=speculation),
    )
    spec = resolve_options(tree).engine
    executor = InlineExecutor(spec)
    core = EngineCore(spec, executor)
    rng = np.random.default_rng(0)
    for number in range(4):
        text = np.tile(rng.integers(300, 3000, 9), 4).astype("<i4")
        stop, sampling = StopRules(max_tokens=60, min_tokens=60), RowSampling(seed=number)
        core.add(EngineRequest(id=number, prompt=text.tobytes(), stop=stop, sampling=sampling))
    while core.has_work:
        core.step(wait=True)
    executor.close()
    stats = core.scheduler.speculation.stats
    assert stats.num_drafts > 20
    mean = stats.num_accepted_tokens * 2 / stats.num_draft_tokens
    assert least <= mean <= most, mean
