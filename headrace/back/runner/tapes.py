"""Steps on a CPU: decodes of a few rows are recorded as tapes of native calls (kernels/native/tape.py) and replayed by one
call; steps with prompts in them, whose arithmetic dwarfs the host's work, are run exactly as they are.

Both kinds share the rows, so a request may go from one to the other at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from headrace.back.kernels.native.library import NativeLibrary
from headrace.back.kernels.native.tape import Arena, Recorder, Tape, unowned
from headrace.back.runner.batch import StepShape
from headrace.back.runner.buckets import Bucket, BucketSteps, Outputs
from headrace.back.runner.steps import ExactSteps, Machine, Moment, Now, Ran
from headrace.base.config.resolved import Decision
from headrace.base.wire.step import StepPlan

MOST_ROWS = 64
"""Above it a step takes so long that the host's work beside it does not matter, and a tape's memory would."""


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    tape: Tape
    outputs: Outputs


class Tapes:
    """`Replay` on a CPU: a bucket's step is run the first time, recorded the second, replayed from then on."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._arena = Arena()
        self._tapes: dict[Bucket, _Recorded] = {}
        self._seen: set[Bucket] = set()
        self.foreign: tuple[str, ...] = ()

    @property
    def num_tapes(self) -> int:
        """Tapes that are kept."""
        return len(self._tapes)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Replay: tapes are made while serving; `RecordedSteps` tells what will be."""
        return ()

    def scope(self) -> AbstractContextManager[object]:
        """See Replay."""
        return nullcontext()

    def run(self, bucket: Bucket, step: Callable[[Bucket], Outputs]) -> Outputs:
        """See Replay."""
        found = self._tapes.get(bucket)
        if found is not None:
            found.tape.replay()
            return found.outputs
        if bucket not in self._seen or self.foreign:
            self._seen.add(bucket)
            return step(bucket)
        return self._record(bucket, step)

    def _record(self, bucket: Bucket, step: Callable[[Bucket], Outputs]) -> Outputs:
        """Runs the step and keeps what it did, unless an operation of torch had a part in it."""
        recorder = Recorder(self._library, self._arena)
        with recorder:
            outputs = step(bucket)
        if recorder.foreign:
            self.foreign = tuple(sorted(set(recorder.foreign)))
            return outputs
        kept = Outputs(
            hidden_TE=unowned(outputs.hidden_TE),
            logits_RV=unowned(outputs.logits_RV),
            picks=(unowned(outputs.picks[0]), unowned(outputs.picks[1])),
        )
        self._tapes[bucket] = _Recorded(tape=recorder.tape(), outputs=kept)
        return kept

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Replay."""
        target.copy_(source)

    def moment(self) -> Moment:
        """See Replay."""
        return Now()


class RecordedSteps:
    """`Steps` that replays decodes and runs everything else exactly."""

    def __init__(self, machine: Machine, decodes: BucketSteps) -> None:
        self.rows = decodes.rows
        self.common_rows: tuple[int, ...] = ()
        self._decodes = decodes
        self._exact = ExactSteps(machine, decodes.rows)
        why = f"decodes of at most {MOST_ROWS} rows, each size from its third step on"
        self.decisions: tuple[Decision, ...] = (
            *decodes.decisions,
            Decision("graphs", "auto", "recorded native calls", why),
        )

    def scope(self) -> AbstractContextManager[object]:
        """See Steps."""
        return nullcontext()

    def use_kv(self, kv: tuple[torch.Tensor, ...]) -> None:
        """See Steps."""
        self._decodes.use_kv(kv)
        self._exact.use_kv(kv)

    def run(self, plan: StepPlan, shape: StepShape) -> Ran:
        """See Steps."""
        decode = shape.num_decodes == shape.rows.size <= MOST_ROWS
        return (self._decodes if decode else self._exact).run(plan, shape)

    def moment(self) -> Moment:
        """See Steps."""
        return Now()
