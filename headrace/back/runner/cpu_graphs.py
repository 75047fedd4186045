"""Steps on a CPU: each is of exactly its own size, and decodes of a few rows are recorded as graphs
of native calls (kernels/native/library.py) and replayed by one call. A prompt's arithmetic dwarfs
the host's work: such steps are called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.native.library import Arena, CpuGraph, NativeLibrary, Recorder, unowned
from headrace.back.runner.replay import DeferredSampling
from headrace.back.runner.results import PassedEvent, StepEvent, StepTensors
from headrace.back.runner.sizes import Bucket
from headrace.base.config.resolved import Decision

MOST_ROWS = 64
"""Above it a step takes so long that the host's work beside it does not matter, and a graph's
memory would."""


class ExactSizes:
    """`Sizes` without padding, which costs time on a CPU and buys nothing. A CPU graph is soon
    made: none is at start."""

    common_rows: tuple[int, ...] = ()
    distinct_rows: tuple[int, ...] = ()

    def __init__(self, *, max_rows: int, max_tokens: int, groups: int) -> None:
        self._groups = groups
        self.largest = self.of(tokens=max_tokens, rows=max_rows)

    def of(self, *, tokens: int, rows: int, whole: bool = False) -> Bucket:
        """The step's own size."""
        updates = self._groups * (tokens // 8 + 2 * rows)
        return Bucket(tokens=tokens, rows=rows, decode=tokens == rows, updates=updates)

    def verifying(self, *, tokens: int, rows: int, queries: int) -> Bucket:
        """See Sizes. Kernels do not ask how the tokens are spread over the rows."""
        return replace(self.of(tokens=tokens, rows=rows), decode=False, queries=tokens)


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """`rest`: what follows the masks, of a step that waits for them."""

    graph: CpuGraph
    outputs: StepTensors
    rest: CpuGraph | None = None


class CpuGraphs:
    """`Replay` on a CPU: a bucket's step is run the first time, recorded the second, replayed from
    then on."""

    on_host = True

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._arena = Arena()
        self._graphs: dict[Bucket, _Recorded] = {}
        self._seen: set[Bucket] = set()
        self._foreign: dict[Bucket, set[str]] = {}

    @property
    def foreign(self) -> tuple[str, ...]:
        """Operations of torch that compute something in steps that are not recorded for that."""
        return tuple(sorted(set().union(*self._foreign.values())))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Replay."""
        why = f"decodes of at most {MOST_ROWS} tokens, each size from its third step on"
        return (Decision("graphs", "auto", "recorded native calls", why),)

    @property
    def num_graphs(self) -> int:
        """See Replay."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """See Replay: the memory that all share, and each one's list of calls."""
        lists = sum(recorded.graph.num_bytes for recorded in self._graphs.values())
        return self._arena.num_bytes + lists

    def scope(self) -> AbstractContextManager[object]:
        """See Replay."""
        return nullcontext()

    def follow(self) -> None:
        """See Replay. There is one order of work."""

    def compiling(self) -> None:
        """See Replay."""

    def run(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> StepTensors:
        """See Replay."""
        recorded = self._graphs.get(bucket)
        if recorded is not None:
            recorded.graph.replay()
            if rest is not None and recorded.rest is not None:
                rest.take_masks()
                recorded.rest.replay()
            return recorded.outputs
        small = self.wants(bucket)
        if small and bucket in self._seen:
            return self._record(bucket, step, rest)
        if small:
            self._seen.add(bucket)
        tensors = step(bucket)
        return tensors if rest is None else rest(bucket, tensors)

    def wants(self, bucket: Bucket) -> bool:
        """See Replay."""
        small = bool(bucket.decode or bucket.queries) and bucket.tokens <= MOST_ROWS
        return small and bucket not in self._foreign and bucket not in self._graphs

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
        """See Replay. The step runs while it is recorded."""
        self._record(bucket, step, rest)

    def _record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None,
    ) -> StepTensors:
        """Runs the step and keeps what it did, unless an operation of torch had a part in it."""
        recorders = [Recorder(self._library, self._arena)]
        with recorders[0]:
            outputs = step(bucket)
        if rest is not None:
            rest.take_masks()
            recorders.append(Recorder(self._library, self._arena))
            with recorders[1]:
                outputs = rest.sample(bucket, outputs)
        foreign = {name for recorder in recorders for name in recorder.foreign}
        if foreign:
            self._foreign[bucket] = foreign
            return outputs
        graphs = [recorder.graph() for recorder in recorders]
        kept = outputs.aliases(unowned)
        self._graphs[bucket] = _Recorded(
            graph=graphs[0], outputs=kept, rest=graphs[1] if rest is not None else None
        )
        return kept

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Replay."""
        assert target is source, "a CPU's results are on the host"

    def event(self) -> StepEvent:
        """See Replay."""
        return PassedEvent()
