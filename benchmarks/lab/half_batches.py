"""A batch that decodes as one step beside two steps of half as many rows each, on two streams, so that reading keys and
values of one half may run beside the products of the other: Qwen3-8B's shape, the engine's own kernels (chain.py).

    python -m benchmarks.lab.half_batches [--cases 256x128-384,512x128-384,256x1024] [--out halves.json]

Milliseconds of a step of all rows, medians of rounds in which all ways take turns, each under load for so long that the
clock settles; clock and power beside them:

    one             one recorded step of all rows
    in turn         the recorded steps of both halves, one after the other: what halving costs
    two streams     each half's recorded steps on a stream of its own, running freely
    two branches    both halves in one recorded step, as two branches that run freely
    taking turns    the same, but the halves attend in turn: while one does, the other multiplies (without dependent
                    launch, which cannot wait for two kernels)
    no attention    one recorded step of all rows whose layers do not attend: what is there to run beside it

`same_bits`: half a batch gives the same beside the other half as alone, or the way is wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.h200.chain import MODELS, Stages, Step, StepInputs, end_of
from benchmarks.h200.shapes import device_name
from benchmarks.h200.where import Clocks
from headrace.back.kernels.attention import triton_attention
from headrace.back.kernels.attention.op import SamplePlan
from headrace.back.kernels.triton import wrap
from headrace.back.kernels.triton.ahead import compiling

ROUNDS, SECONDS = 3, 0.35
Launch = Callable[[], object]
Outputs = tuple[torch.Tensor, torch.Tensor]


def some_rows(inputs: StepInputs, begin: int, end: int) -> StepInputs:
    """Rows of a batch as one of their own, over the same caches."""
    plan, count = inputs.plan, end - begin
    part = SamplePlan(
        query_start_R1=plan.query_start_R1[: count + 1].clone(),
        kv_len_R=plan.kv_len_R[begin:end].clone(),
        block_table_RB=plan.block_table_RB[begin:end].clone(),
        slot_T=plan.slot_T[begin:end].clone(),
        host_query_start=plan.host_query_start[: count + 1],
        host_kv_len=plan.host_kv_len[begin:end],
        num_decodes=count,
        max_query_len=1,
        max_kv_len=int(plan.host_kv_len[begin:end].max()),
    )
    return StepInputs(plan=part, kv=inputs.kv, start=inputs.start[begin:end].clone())


def _ended(stages: Callable[[], Stages]) -> Outputs:
    return end_of(stages())


def in_turn(parts: list[Stages], streams: list[torch.cuda.Stream]) -> list[Outputs]:
    """Launches parts of a batch so that one attends when the other has: by events between their streams."""
    outputs: list[Outputs] = []
    attended: torch.cuda.Event | None = None
    for stages, stream in zip(parts, streams, strict=True):
        with torch.cuda.stream(stream):
            next(stages)
    while len(outputs) < len(parts):
        for stages, stream in zip(parts, streams, strict=True):
            with torch.cuda.stream(stream):
                if attended is not None:
                    stream.wait_event(attended)
                next(stages)
                attended = stream.record_event()
                try:
                    next(stages)
                except StopIteration as end:
                    outputs.append(end.value)
    return outputs


class Ways:
    """Of a batch: how to launch its step, recorded."""

    def __init__(self, step: Step, lengths: list[int]) -> None:
        self.step, middle = step, len(lengths) // 2
        self.whole = step.inputs(lengths)
        bounds = ((0, middle), (middle, len(lengths)))
        self.parts = [some_rows(self.whole, *one) for one in bounds]
        self.streams = [torch.cuda.Stream() for _ in self.parts]
        self.outputs: dict[str, list[Outputs]] = {}
        self.kept: list[object] = []
        """The calls of graphs, which hold what these read."""

    def compile(self) -> None:
        """Launches everything once; within `compiling`."""
        for inputs in (self.whole, *self.parts):
            self.step.call("fused", inputs)()
        with patch.object(wrap, "has_dependent_launch", lambda device: False):
            self.step.call("fused", self.parts[0])()

    def unattended(self) -> Callable[[], Outputs]:
        """The step whose layers take their queries for what attention gives."""
        with patch.object(triton_attention, "bind", lambda problem: lambda q, kv, plan: q):
            return self.step.call("fused", self.whole)

    def launches(self) -> Iterator[tuple[str, Launch]]:
        """Each way, recorded when it is asked for."""
        first = self.streams[0]
        one = self.recorded("one", [self.step.call("fused", self.whole)], [first])
        yield "one", one.replay
        halves = [
            self.recorded("halves", [self.step.call("fused", part)], [stream])
            for part, stream in zip(self.parts, self.streams, strict=True)
        ]
        yield "in turn", lambda: [half.replay() for half in halves]
        yield "two streams", lambda: self.beside(halves)
        calls = [self.step.call("fused", part) for part in self.parts]
        yield "two branches", self.recorded("two branches", calls, self.streams).replay
        with patch.object(wrap, "has_dependent_launch", lambda device: False):
            yield "taking turns", self.alternating().replay
        yield "no attention", self.recorded("no attention", [self.unattended()], [first]).replay

    def beside(self, halves: list[torch.cuda.CUDAGraph]) -> None:
        """Each on its stream, behind what it did last alone."""
        for half, stream in zip(halves, self.streams, strict=True):
            with torch.cuda.stream(stream):
                half.replay()

    def recorded(
        self, name: str, calls: list[Callable[[], Outputs]], streams: list[torch.cuda.Stream]
    ) -> torch.cuda.CUDAGraph:
        """One graph; each call on its stream, where it has run before: counters and workspaces are a stream's own."""
        self.warm(calls, streams)
        self.kept += calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            for stream in streams[1:]:
                stream.wait_stream(streams[0])
            for call, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    self.outputs.setdefault(name, []).append(call())
            for stream in streams[1:]:
                streams[0].wait_stream(stream)
        return graph

    def alternating(self) -> torch.cuda.CUDAGraph:
        """One graph of both halves, which attend in turn."""
        stages = [self.step.stages("fused", part) for part in self.parts]
        self.warm([partial(_ended, one) for one in stages], self.streams)
        self.kept += stages
        first, second = self.streams
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=first):
            second.wait_stream(first)
            self.outputs["taking turns"] = in_turn([one() for one in stages], self.streams)
            first.wait_stream(second)
        return graph

    def warm(self, calls: list[Callable[[], Outputs]], streams: list[torch.cuda.Stream]) -> None:
        """Each twice on its stream."""
        for call, stream in zip(calls, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
                call()
        torch.cuda.synchronize()


def ms_of(launch: Launch) -> float:
    """Milliseconds of a launch among so many that they take SECONDS."""

    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            launch()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    return 1e3 * run(max(4, round(SECONDS / run(3))))


def measured(step: Step, rows: int, low: int, high: int, clocks: Clocks | None) -> dict[str, Any]:
    """One size of batch: the times of all ways, and whether halves give the same bits beside each other."""
    lengths = np.random.default_rng(rows).integers(low, high + 1, rows).tolist()
    ways = Ways(step, lengths)
    with compiling():
        ways.compile()
    ways.whole.kv.normal_()
    result: dict[str, Any] = {"rows": rows, "context": [low, high]}
    launches: dict[str, Launch] = {}
    for name, launch in ways.launches():
        launches[name] = launch
        launch()
        torch.cuda.synchronize()
        kept = "halves" if name in ("in turn", "two streams") else name
        tokens = torch.cat([token.clone() for _, token in ways.outputs[kept]])
        logits = [logits.clone() for logits, _ in ways.outputs[kept]]
        if name == "one":
            expected = tokens
        if name == "in turn":
            alone = logits
        same = float((tokens == expected).float().mean())
        result[name] = {"same_tokens": round(same, 3), "ms": []}
        if len(logits) == 2:
            result[name]["same_bits"] = all(map(torch.equal, logits, alone))
    for _ in range(ROUNDS):
        for name, launch in launches.items():
            seen: dict[str, Any] = {}
            with clocks.sampled(seen) if clocks else nullcontext():
                result[name]["ms"].append(ms_of(launch))
            result[name] |= {key: seen[key] for key in ("mhz", "watts") if key in seen}
    for name in launches:
        ms = float(np.median(result[name]["ms"]))
        result[name] |= {"ms": round(ms, 3), "tok_s": round(1e3 * rows / ms)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="256x128-384,512x128-384,256x1024")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    step = Step(next(model for model in MODELS if model.name == "8B"))
    try:
        clocks = Clocks()
    except ImportError:
        clocks = None
    results = []
    for case in given.cases.split(","):
        rows, _, context = case.partition("x")
        low, _, high = context.partition("-")
        found = measured(step, int(rows), int(low), int(high or low), clocks)
        results.append(device_name() | found)
        print(json.dumps(results[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
