"""Steps that are called, kernel by kernel, instead of recorded and replayed: with
`--enforce-eager`, for looking for faults, and where something passes between processes within a
step. Sizes, kernels and results are the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from headrace.back.runner.replay import DeferredSampling, Replay
from headrace.back.runner.results import StepEvent, StepTensors
from headrace.back.runner.sizes import Bucket
from headrace.base.config.resolved import Decision


class Unrecorded:
    """`Replay` that has what `inner` knows of the device, and records nothing. `why`: shown."""

    num_graphs = 0
    num_bytes = 0

    def __init__(self, inner: Replay, why: str) -> None:
        self._inner, self._why = inner, why
        self.on_host = inner.on_host

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Replay."""
        return (Decision("graphs", "auto", "off", self._why),)

    def scope(self) -> AbstractContextManager[object]:
        """See Replay."""
        return self._inner.scope()

    def follow(self) -> None:
        """See Replay."""
        self._inner.follow()

    def compiling(self) -> AbstractContextManager[object] | None:
        """See Replay."""
        return self._inner.compiling()

    def run(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> StepTensors:
        """See Replay."""
        tensors = step(bucket)
        return tensors if rest is None else rest(bucket, tensors)

    def wants(self, bucket: Bucket) -> bool:
        """See Replay."""
        return False

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
        """See Replay: the step runs, so that its kernels are compiled."""
        self.run(bucket, step, rest)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Replay."""
        self._inner.read(target, source)

    def event(self) -> StepEvent:
        """See Replay."""
        return self._inner.event()
