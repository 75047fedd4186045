"""What records the steps of buckets and replays them: the seam between buckets.py and a device's
graphs (cuda_graphs.py, cpu_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from headrace.back.runner.results import StepEvent
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.steps import StepTensors
from headrace.base.config.resolved import Decision


class Replay(Protocol):
    """Runs the step of a bucket, by calling it or by replaying what it once did; and knows the
    device's streams. `on_host`: a step has run when `run` returns."""

    on_host: bool

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What is recorded, for the table of decisions."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        ...

    def follow(self) -> None:
        """Whatever runs from now on comes behind what the current stream has been given so far."""
        ...

    def compiling(self) -> AbstractContextManager[object] | None:
        """See Steps."""
        ...

    def run(self, bucket: Bucket, step: Callable[[Bucket], StepTensors]) -> StepTensors:
        """Runs the bucket's step on the message that was copied last."""
        ...

    def wants(self, bucket: Bucket) -> bool:
        """Whether the bucket's step is not recorded and could be."""
        ...

    def record(self, bucket: Bucket, step: Callable[[Bucket], StepTensors]) -> None:
        """Records the bucket's step, which may run on the message that was copied last."""
        ...

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        ...

    @property
    def num_bytes(self) -> int:
        """The memory that they take, as measured when each was recorded."""
        ...

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to the host behind what was launched, beside what is launched later."""
        ...

    def event(self) -> StepEvent:
        """The point behind everything that was launched and read."""
        ...
