"""CUDA graphs of the buckets' steps, and the streams they run on.

A bucket's step is launched kernel by kernel the first time it is needed (its result goes out, its
kernels are compiled) and recorded the second time; from then on it costs one launch. All graphs
share one memory pool, because steps run one after another; what a graph leaves behind is read
before the next one runs. At most MOST_GRAPHS are kept, the least recently used one goes.

Recording has a stream of its own. A result that another thread lets go of meanwhile makes torch's
allocator of pinned
memory record an event on the stream that filled it: on a stream that is being recorded the event
would go into the graph, and every later allocation, which asks the event, would fail ("invalid
argument").
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from headrace.back.runner.device_graphs import alias, capture
from headrace.back.runner.replay import DeferredSampling
from headrace.back.runner.results import DeviceEvent, StepEvent, StepTensors, recorded
from headrace.back.runner.sizes import Bucket
from headrace.base.config.resolved import Decision

MOST_GRAPHS = 192


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """`rest`: what follows the masks, of a step that waits for them."""

    graph: torch.cuda.CUDAGraph
    outputs: StepTensors
    rest: torch.cuda.CUDAGraph | None = None


class CudaGraphs:
    """`Replay` on a CUDA device. All methods are called by the thread that runs the steps."""

    on_host = False

    def __init__(
        self, device: torch.device, compiling: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._compiles = compiling
        self._stream = torch.cuda.Stream(device)
        self._reads = torch.cuda.Stream(device)
        self._recording = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Bucket, _Recorded] = OrderedDict()
        self._seen: set[Bucket] = set()
        self._read: torch.cuda.Event | None = None
        self._compiling = False
        self._record_s = 0.0
        self._num_bytes = 0

    @property
    def num_graphs(self) -> int:
        """See Replay."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """See Replay: what the device had less after each recording than before it. What the pool
        once took stays in it when a graph goes."""
        return self._num_bytes

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Replay."""
        recorded = (
            f"{self.num_graphs} graphs recorded in {self._record_s:.2f} s, "
            f"{self._num_bytes / 2**20:.0f} MiB"
        )
        later = f"others the second time a size is needed, at most {MOST_GRAPHS}"
        return (Decision("graphs", "auto", recorded, later),)

    def scope(self) -> AbstractContextManager[object]:
        """The stream of the steps."""
        return torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """See Replay."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """See Replay. Steps are neither recorded nor counted as seen."""
        self._compiling = True
        try:
            with self._compiles():
                yield
        finally:
            self._compiling = False

    def run(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> StepTensors:
        """See Replay."""
        recorded = self._graphs.get(bucket)
        if self._compiling or (recorded is None and bucket not in self._seen):
            if not self._compiling:
                self._seen.add(bucket)
            tensors = step(bucket)
            return tensors if rest is None else rest(bucket, tensors)
        if recorded is None:
            recorded = self._record(bucket, step, rest)
        else:
            self._graphs.move_to_end(bucket)
        recorded.graph.replay()
        if rest is not None and recorded.rest is None:  # recorded by a step that was sampled apart
            return rest(bucket, recorded.outputs)
        if rest is not None and recorded.rest is not None:
            rest.take_masks()
            recorded.rest.replay()
        return recorded.outputs

    def wants(self, bucket: Bucket) -> bool:
        """See Replay. None goes for one that nobody waits for."""
        return bucket not in self._graphs and len(self._graphs) < MOST_GRAPHS

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
        """See Replay. A step that has not run before runs first, which compiles its kernels."""
        if bucket not in self._seen:
            self.run(bucket, step, rest)
        self._record(bucket, step, rest)

    def _record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None,
    ) -> _Recorded:
        """Records a step that has run before; nothing is executed."""
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        begin = time.perf_counter()
        free, _ = torch.cuda.mem_get_info(self._stream.device)
        graph, outputs = self._capture(partial(step, bucket))
        behind = None
        if rest is not None:  # what it reads is held while it is recorded: it gets other memory
            behind = self._capture(partial(rest.sample, bucket, outputs))[0]
        # The pool may give the outputs' memory to the next graph that is recorded: they are read
        # before it runs.
        aliases = outputs.aliases(alias)
        del outputs
        self._graphs[bucket] = _Recorded(graph=graph, outputs=aliases, rest=behind)
        left, _ = torch.cuda.mem_get_info(self._stream.device)
        self._num_bytes += max(0, free - left)
        self._record_s += time.perf_counter() - begin
        return self._graphs[bucket]

    def _capture(self, work: Callable[[], StepTensors]) -> tuple[torch.cuda.CUDAGraph, StepTensors]:
        return capture(work, self._recording, self._pool)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Replay."""
        self._reads.wait_event(recorded())
        with torch.cuda.stream(self._reads):
            target.copy_(source, non_blocking=True)
            self._read = recorded()

    def event(self) -> StepEvent:
        """See Replay."""
        events = (recorded(),) if self._read is None else (self._read, recorded())
        self._read = None
        return DeviceEvent(events)
