"""Runners of the stages of a pipeline. Each is given every plan and runs its layers of it.

The last stage samples, tells the core, and sends the tokens back. An earlier stage takes them
before it begins a plan that touches one of their rows; until then it goes on with plans of other
rows, or with the next chunk of a prompt, so that stages work at the same time. Both sides know from
the plans alone which steps have tokens, and in which order they come.

N tokens sampled in a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.parallel.pipe import Pipe
from headrace.back.runner.batch import Rows, StepShape, shape_of
from headrace.back.runner.results import LaunchedStep
from headrace.back.runner.runner import AwaitDeferred, Runner, RunnerPlan, once
from headrace.back.runner.stage_steps import make_stage_steps
from headrace.back.sampling.in_step import HeadOutput
from headrace.base.errors import ConfigError
from headrace.base.wire.step import StepPlan

TOKENS, LOST, WORDS = 0, 1, 2
"""Of what the last stage sends back, int32 [WORDS, N]: the tokens, marked where they do not stand
(op step_verify), and whether the logits were not finite."""


def runner_of(plan: RunnerPlan) -> Runner:
    """The runner of this rank's stage."""
    pipe = plan.pipe
    if pipe is None:
        return Runner(plan)
    if plan.spec.speculation is not None and plan.model.state != "plain":
        raise ConfigError(
            "--speculative-config: drafts of a recurrent model are taken back on one stage alone; "
            "leave it out, or use --tensor-parallel instead of --pipeline-parallel",
            field="speculative_config",
        )
    is_last = pipe.stage == pipe.num_stages - 1
    plan = dataclasses.replace(plan, steps=functools.partial(make_stage_steps, is_last=is_last))
    return LastStage(plan, pipe) if is_last else EarlierStage(plan, pipe)


class LastStage(Runner):
    """Tells the earlier stages what it has sampled."""

    def __init__(self, plan: RunnerPlan, pipe: Pipe) -> None:
        super().__init__(plan)
        self._pipe = pipe

    def _launch(
        self, plan: StepPlan, await_deferred: AwaitDeferred, all_hidden: bool
    ) -> LaunchedStep:
        """A step is never tried twice: the other stages have gone on."""
        self._settle()
        if plan.deferred:
            await_deferred = once(await_deferred)
        launched_step = self._run(plan, await_deferred, all_hidden)
        if launched_step.sampled is not None:
            launched_step.event.wait()
            token_N, errors = launched_step.sampled.read()
            message = np.zeros((WORDS, token_N.size), np.int32)
            message[TOKENS] = token_N
            message[LOST, [i for i in errors if token_N[i] >= 0]] = 1
            self._pipe.send_back(to_device(message, self._device))
        return launched_step


class EarlierStage(Runner):
    """Runs its layers and hands the residual on; samples nothing. Its results say nothing."""

    def __init__(self, plan: RunnerPlan, pipe: Pipe) -> None:
        super().__init__(plan)
        self._pipe = pipe
        self._open: deque[StepShape] = deque()
        """Steps whose tokens have not been taken, oldest first."""

    def _launch(
        self, plan: StepPlan, await_deferred: AwaitDeferred, all_hidden: bool
    ) -> LaunchedStep:
        self._take_tokens(plan)
        self._settle()
        return self._run(plan, await_deferred, all_hidden)

    def _run(self, plan: StepPlan, await_deferred: AwaitDeferred, all_hidden: bool) -> LaunchedStep:
        self._begin(plan)
        if not plan.rows.size:
            self._steps.rows.apply(plan)
            return LaunchedStep(plan=plan)
        plan = self._steps.begin(plan, HeadOutput.LOGITS, lambda: memoryview(b""))
        shape = shape_of(plan)
        if self._slots is not None:
            shape = dataclasses.replace(shape, slots=self._slots.of(shape.rows))
        self._steps.run(plan, _unsampled(shape), take_masks=lambda: None)
        if shape.sampled.size:
            self._open.append(shape)
        return LaunchedStep(plan=plan, event=self._steps.event())

    def _begin(self, plan: StepPlan) -> None:
        if plan.ends.size:
            self._state.end(plan.ends)
        if self._slots is not None:
            self._slots.begin(plan.starts)
        for start in plan.starts:
            self._state.start(start)

    def _take_tokens(self, plan: StepPlan) -> None:
        """Those of all steps up to the last one whose rows the plan touches, and of those whose
        results the core must have had to make this plan."""
        touched = {*plan.rows.tolist(), *plan.ends.tolist()}
        touched.update(entry.row for entry in (*plan.starts, *plan.feeds))
        last = len(self._open) - 1 - self._pipe.num_stages
        for index, shape in enumerate(self._open):
            if not touched.isdisjoint(shape.sampled_row.tolist()):
                last = max(last, index)
        for _ in range(last + 1):
            self._take(self._open.popleft())

    def _take(self, shape: StepShape) -> None:
        size = (WORDS, shape.sampled.size)
        message = self._pipe.receive_back(torch.empty(size, dtype=torch.int32, device=self._device))
        token_N, lost_N = message.cpu().numpy()
        append_tokens(self._steps.rows, shape, token_N)
        if lost_N.any():
            self._lost.append(shape.sampled_row[lost_N != 0])


def append_tokens(rows: Rows, shape: StepShape, token_N: np.ndarray) -> None:
    """The rows of a step have the tokens of it that stand."""
    stands_N = np.flatnonzero(token_N >= 0) if shape.verifies else np.arange(token_N.size)
    row_N = shape.sampled_row[stands_N]
    # Of a row's several tokens the last one says how long it is: index by index, not at once.
    is_last_N = np.append(row_N[1:] != row_N[:-1], True)
    for at in (stands_N[~is_last_N], stands_N[is_last_N]):
        if at.size:
            token_K = to_device(token_N[at].astype(np.int32), rows.device)
            rows.append(shape.sampled_row[at], shape.sampled_position[at], token_K)


def _unsampled(shape: StepShape) -> StepShape:
    """The same step, of which nothing is sampled here."""
    nothing = shape.sampled[:0]
    return dataclasses.replace(
        shape, sampled=nothing, sampled_row=nothing, sampled_position=nothing, place=nothing
    )
