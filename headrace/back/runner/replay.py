"""What records the steps of buckets and replays them: the seam between buckets.py and a device's
graphs (cuda_graphs.py, cpu_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from headrace.back.runner.results import StepEvent
from headrace.back.runner.sizes import Bucket
from headrace.back.runner.steps import StepTensors, TakeMasks
from headrace.back.sampling.in_step import StepSamples
from headrace.base.config.resolved import Decision

RING = 8
"""Slots of messages and results; two steps are in flight at most, so a slot is long free when it is
used again."""


@dataclass(frozen=True)
class DeferredSampling:
    """The part of a step that waits for masks: what comes before it is on the device's way when
    `take_masks` is called, and `sample` is recorded apart from it."""

    take_masks: TakeMasks
    sample: Callable[[Bucket, StepTensors], StepTensors]

    def __call__(self, bucket: Bucket, tensors: StepTensors) -> StepTensors:
        """Runs it on what the step has left."""
        self.take_masks()
        return self.sample(bucket, tensors)


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

    def run(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> StepTensors:
        """Runs the bucket's step on the message that was copied last; `rest`: what follows once
        the step's masks have come."""
        ...

    def wants(self, bucket: Bucket) -> bool:
        """Whether the bucket's step is not recorded and could be."""
        ...

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
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


class SampleRing:
    """RING slots of what steps have sampled: `data` on the device, cut into `slots`; `host`, their
    copies; `samples`: slot, W and whether behind masks -> what is read there. Cut once: each small
    operation of torch costs microseconds, and some give up the interpreter's lock."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.data = torch.zeros((RING, *shape), dtype=torch.int32, device=device)
        self.slots = self.data.unbind()
        host = device.type == "cpu"  # which reads the ring itself
        self.host = self.slots if host else host_buffer((RING, *shape), device).unbind()
        arrays = [slot.numpy() for slot in self.host]
        self.samples = cache(
            lambda slot, words, masked: StepSamples.of(arrays[slot], words, masked=masked)
        )


def host_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros int32 on the host, which a copy to or from the device does not wait for."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
