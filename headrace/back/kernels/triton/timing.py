"""How kernels are timed on a GPU: chains of launches in a graph, over so many different tensors
that no cache helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CACHE_BYTES = 60 << 20
"""Second-level cache of the largest GPUs in use."""


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, one after the other; the first two have run before, so that nothing
    compiles inside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, *, replays: int = 7) -> float:
    """Median microseconds of a replay."""
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def each_us(calls: Sequence[Callable[[], object]], *, replays: int = 7) -> float:
    """Median microseconds of one call of a chain."""
    return replay_us(graph_of(calls), replays=replays) / len(calls)


def copies(num_bytes: int, *, least: int = 4, most: int = 64) -> int:
    """How many tensors of a size to rotate over, so that each has left the cache when it comes
    again."""
    return max(least, min(most, -(-6 * CACHE_BYTES // max(1, num_bytes))))
