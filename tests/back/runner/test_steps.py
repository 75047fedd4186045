"""Who chooses a step's tokens: the first way that what the step has left suffices for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.runner.batch import StepShape
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.devices import make_steps
from headrace.back.runner.results import ChoiceInStep, StepOutputs, StepTensors
from headrace.back.runner.runner import Runner
from headrace.back.runner.start import start_runner
from headrace.back.runner.steps import AmongCandidates, FromLogits
from headrace.back.sampling.in_step import StepSamples
from headrace.base.wire.request import RowSampling
from tests.back.driver import Driver
from tests.back.tiny_model import TinyModel, tiny_spec

HIDDEN = torch.zeros(2, 4)
ARGMAX = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
SAMPLES = StepSamples(tokens=np.zeros(2, np.int32), max_logit=np.zeros(2, np.float32))
LOGITS = StepTensors(hidden_TE=HIDDEN, logits_RV=torch.zeros(2, 9), argmax=ARGMAX)


ROWS: Any = SimpleNamespace(verifies=False)


def runner() -> Runner:
    spec = tiny_spec(max_step_tokens=400)
    return start_runner(spec, TinyModel(), device=torch.device("cpu"), steps=make_steps).runner


@pytest.mark.parametrize("outputs, way", [
    (StepOutputs(out=StepTensors(hidden_TE=HIDDEN, argmax=ARGMAX), samples=SAMPLES), ChoiceInStep),
    (StepOutputs(out=LOGITS, samples=SAMPLES), ChoiceInStep),
    (StepOutputs(out=StepTensors(hidden_TE=HIDDEN, top_candidates=ARGMAX)), AmongCandidates),
    (StepOutputs(out=LOGITS), FromLogits),
])  # fmt: skip
def test_the_first_way_that_the_outputs_suffice_for_chooses(
    outputs: StepOutputs, way: type
) -> None:
    choice = next(choice for choice in runner()._choices if choice.takes(ROWS, outputs))
    assert type(getattr(choice, "_way", choice)) is way


def test_what_left_nothing_has_no_way() -> None:
    nothing = StepOutputs(out=StepTensors(hidden_TE=HIDDEN))
    assert not any(choice.takes(ROWS, nothing) for choice in runner()._choices)


@pytest.mark.parametrize("sampling, way", [
    (RowSampling(temperature=0.0), ChoiceInStep),
    (RowSampling(seed=3, temperature=0.7), FromLogits),
    (RowSampling(temperature=0.0, dry_multiplier=0.8), FromLogits),
])  # fmt: skip
def test_rows_are_chosen_by_the_way_of_what_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, sampling: RowSampling, way: type
) -> None:
    """On a CPU with native kernels; where these are missing, all rows go from logits."""
    chosen: list[type] = []
    for one, name in (
        (ChoiceInStep, "choose"),
        (AmongCandidates, "sample"),
        (FromLogits, "sample"),
    ):

        def noted(
            self: object,
            shape: StepShape,
            outputs: StepOutputs,
            masks: object,
            of: Any = getattr(one, name),
        ) -> object:
            chosen.append(type(self))
            return of(self, shape, outputs, masks)

        monkeypatch.setattr(one, name, noted)
    here = runner()
    driver = Driver(here.facts)
    row = driver.add([4, 8, 15, 16], sampling)
    for count in (4, 1, 1):
        driver.read(here.execute(driver.plan([(row, count)])))
    assert len(row.outputs) == 3 and row.error is None
    assert chosen[-1] is (way if isinstance(here._steps, BucketSteps) else FromLogits)
