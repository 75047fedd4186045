"""Stages of a pipeline in one thread, one behind the other: an executor whose last stage lags behind
until somebody waits for it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.back.runner.runner import Runner
from headrace.back.runner.stages import runner_of
from headrace.back.runner.start import plan_runner
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.step import StepPlan, StepResult, WorkerFacts

CPU = torch.device("cpu")


@dataclass
class QueuedPipe:
    """Messages in lists. Whoever waits for one has the stages that lag run first."""

    stage: int
    num_stages: int
    before: deque[torch.Tensor] = field(default_factory=deque)
    back: deque[torch.Tensor] = field(default_factory=deque)
    others: list[QueuedPipe] = field(default_factory=list)
    lagging: list = field(default_factory=list)
    waits: int = 0

    def send_on(self, x: torch.Tensor) -> None:
        self.others[self.stage + 1].before.append(x)

    def receive_into(self, x: torch.Tensor) -> torch.Tensor:
        sent = self.before.popleft()
        assert sent.shape == x.shape, (sent.shape, x.shape)
        return x.copy_(sent)

    def send_back(self, x: torch.Tensor) -> None:
        for other in self.others[:-1]:
            other.back.append(x)

    def receive_back(self, x: torch.Tensor) -> torch.Tensor:
        while not self.back:
            self.waits += 1
            self.lagging[0]()
        return x.copy_(self.back.popleft())


def pipes_of(stages: int) -> list[QueuedPipe]:
    """The ends of all stages."""
    pipes = [QueuedPipe(stage, stages) for stage in range(stages)]
    for pipe in pipes:
        pipe.others = pipes
    return pipes


def mesh_of(pipe: QueuedPipe, layers: tuple[int, ...] = ()) -> Mesh:
    """The mesh of one stage."""
    axis = Axis(name="pp", size=pipe.num_stages, rank=pipe.stage, group=object())
    return Mesh(pp=axis, pipe=pipe, stage_layers=layers)


class StagedExecutor:
    """An `Executor` of two stages. The first runs each plan when it is submitted, the last when a
    result or a token is waited for."""

    def __init__(self, spec: EngineSpec) -> None:
        self.pipes = pipes_of(2)
        self.runners: list[Runner] = []
        for pipe in self.pipes:
            mesh = mesh_of(pipe, spec.device.pipeline_layers)
            model, _ = load_model(
                spec.model, mesh=mesh, device=CPU, block_tokens=spec.kv.block_tokens
            )
            plan = plan_runner(spec, model, device=CPU)
            self.runners.append(runner_of(replace(plan, pipe=pipe)))
            pipe.lagging.append(self._run_last)
        self._waiting: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self.most_ahead = 0

    @property
    def facts(self) -> WorkerFacts:
        return self.runners[-1].facts

    def submit(self, plan: StepPlan) -> LaggingStep:
        self.runners[0].launch(plan).result()
        done: Future[StepResult] = Future()
        self._waiting.append((plan, done))
        self.most_ahead = max(self.most_ahead, len(self._waiting))
        return LaggingStep(self, done)

    def _run_last(self) -> None:
        plan, done = self._waiting.popleft()
        done.set_result(self.runners[-1].launch(plan).result())

    def close(self) -> None:
        for runner in self.runners:
            runner.release()


@dataclass(frozen=True)
class LaggingStep:
    """A step that the last stage has perhaps not run."""

    executor: StagedExecutor
    future: Future[StepResult]

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> StepResult:
        while not self.future.done():
            self.executor._run_last()
        return self.future.result()
