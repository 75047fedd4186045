"""The seam between the runner and a kind of model (ENG-22)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.back import runner as runner_package
from headrace.back.attention.plan import Batch
from headrace.back.runner.batch import StepShape
from headrace.back.runner.start import start_runner
from headrace.back.runner.states import STATES
from headrace.base.wire.step import RowStart
from tests.back.driver import Driver
from tests.back.tiny_model import TinyModel, tiny_spec

CPU = torch.device("cpu")


class Reversed:
    """A state that counts positions down, and notes in which order it was called."""

    in_graphs = False
    repeatable = True
    pools_whole = False
    host_until = None
    media_tokens = media_width = 0
    media_rows: dict[str, int] = {}

    def take(self, payloads: Mapping[str, bytes]) -> None:
        self.calls.append("take")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def end(self, rows: np.ndarray) -> None:
        self.calls.append("end")

    def start(self, start: RowStart) -> None:
        self.calls.append("start")

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        self.calls.append("prepare")
        return replace(batch, positions_T=100 - batch.positions_T)

    def before(self, batch: Batch) -> None:
        self.calls.append("before")

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        self.calls.append("after")
        assert hidden_TE.shape[0] == batch.positions_T.shape[0]


class Watched(TinyModel):
    """Keeps the positions that reached the model."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.seen.append(batch.positions_T.tolist())
        return super().forward(batch)


def test_a_state_sees_rows_and_steps_in_order_and_what_it_prepares_reaches_the_model() -> None:
    state, model = Reversed(), Watched()
    runner = start_runner(tiny_spec(), model, device=CPU, state=lambda *_: state).runner
    state.calls.clear()
    model.seen.clear()
    driver = Driver(runner.facts)
    first, second = driver.add([5, 6, 7]), driver.add([8, 9], request=1)
    runner.launch(driver.plan([(first, 3)])).result()
    assert state.calls == ["start", "prepare", "before", "after"] and model.seen == [[100, 99, 98]]
    first.unknown = 0
    driver.release(first)
    runner.launch(driver.plan([(second, 2)])).result()
    assert state.calls[4:] == ["end", "start", "prepare", "before", "after"]
    assert model.seen[1:] == [[100, 99]]


@pytest.mark.parametrize("name", ["runner.py", "steps.py", "buckets.py", "batch.py"])
def test_the_runner_asks_for_no_kind_of_model(name: str) -> None:
    """Its rooms name none of the states, so that a new kind is a new row of the table."""
    source = (Path(runner_package.__file__).parent / name).read_text()
    words = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not words & STATES.keys()
