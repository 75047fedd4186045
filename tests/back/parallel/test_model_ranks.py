"""A model over four ranks on two GPUs, two on each, by our sums (`make test-gpu`): the tokens of
one rank.

The executor gives each rank a device of its own; here the ranks are put together from the same
pieces, with steps that are launched and not replayed: what is left to the library, the logits'
parts, goes through the host.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.batch import Rows
from headrace.back.runner.exact_steps import ExactSteps
from headrace.back.runner.runner import Runner
from headrace.back.runner.start import start_runner
from headrace.back.runner.steps import StepResources
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.step import StepPlan, StepResult
from tests.back.parallel.ranks import join, running
from tests.back.test_cuda import GREEDY, bundled_spec, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here"),
]
RANKS = 4


class Ranked:
    """What `generate` asks of an executor, by this rank's runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.facts = runner.facts

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Runs the step to its end."""
        done: Future[StepResult] = Future()
        done.set_result(self._runner.execute(plan))
        return done


def exact_steps(resources: StepResources, spec: EngineSpec, *, num_groups: int) -> ExactSteps:
    """Steps that are launched kernel by kernel."""
    rows = Rows.growing(
        max_rows=spec.scheduler.max_running,
        num_groups=num_groups,
        block_tokens=spec.kv.block_tokens,
        device=resources.device,
    )
    return ExactSteps(resources, rows, "gloo cannot go into a graph")


def rank_main(rank: int, folder: str) -> None:
    """One rank: its tokens go to a file."""
    from headrace.back.kernels.all_reduce.measured import SIZES, MeasuredSums, Timed, peer_sums

    axis, device = join(rank, RANKS, folder, per_device=2)
    short, long = {"one shot": 1.0, "two shots": 2.0}, {"one shot": 2.0, "two shots": 1.0}
    sums = MeasuredSums(
        peer_sums(axis, device),
        tuple(
            Timed(size, {"library": 9.0, **(short if i < 1 else long)})
            for i, size in enumerate(SIZES)
        ),
    )
    spec = bundled_spec("cuda", "float32", tensor_parallel=RANKS)
    model, _ = load_model(
        spec.model,
        mesh=Mesh(tp=replace(axis, summing=sums)),
        device=device,
        block_tokens=spec.kv.block_tokens,
    )
    executor = Ranked(start_runner(spec, model, device=device, steps=exact_steps).runner)
    found = [generate(executor, GREEDY, chunk=6) for _ in range(2)]
    outputs = [[row.outputs for row in rows] for rows in found]
    Path(folder, f"tokens-{rank}").write_text(json.dumps(outputs))
    os._exit(0)


def test_four_ranks_on_two_devices_give_the_tokens_of_one(tmp_path: Path) -> None:
    """KRN-27: chunks beside decodes; every rank has the same tokens, those of one rank on CUDA."""
    with running(rank_main, [(rank, str(tmp_path)) for rank in range(RANKS)]):
        alone = InlineExecutor(bundled_spec("cuda", "float32"))
        theirs = [row.outputs for row in generate(alone, GREEDY, chunk=6)]
        alone.close()
    every = [json.loads((tmp_path / f"tokens-{rank}").read_text()) for rank in range(RANKS)]
    assert all(one == every[0] for one in every)
    for ours in every[0]:
        same = [one == two for one, two in zip(ours, theirs, strict=True)]
        assert sum(same) >= len(same) - 1, same
