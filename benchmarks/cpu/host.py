"""Host time of a decode step outside the native kernels: from the end of one replay to the start of the next.

    python -m benchmarks.cpu.host [--streams 1,8,32] [--steps 200]

The bundled model; the gap holds planning, the message, the result and the threads' hand-over. Median and minimum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from headrace.back.kernels.native.library import CpuGraph
from headrace.base.config.options import CommandLine
from headrace.bench.offline import OfflineEngine
from headrace.bench.report import markdown_table
from headrace.launch.facts import resolve_options

BUNDLED = Path(__file__).resolve().parents[2] / "demo" / "model"


def spans_of(streams: int, steps: int) -> list[tuple[float, float]]:
    """Begin and end of each replay, seconds."""
    line = CommandLine("host", "", groups=("model", "kv", "scheduler", "device"))
    words = ["--model", str(BUNDLED), "--dtype", "bfloat16", "--no-prefix-caching"]
    _, options = line.parse(words)
    engine, spans, replay = OfflineEngine(resolve_options(options)), [], CpuGraph.replay

    def timed(graph: CpuGraph) -> None:
        begin = time.perf_counter()
        replay(graph)
        spans.append((begin, time.perf_counter()))

    rng = np.random.default_rng(0)
    CpuGraph.replay = timed
    try:
        engine.run([engine.request(rng, 16, steps, 0.0) for _ in range(streams)])
    finally:
        CpuGraph.replay = replay
        engine.close()
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    rows = []
    for streams in map(int, given.streams.split(",")):
        spans = spans_of(streams, given.steps)
        gaps = [1e6 * (after[0] - before[1]) for before, after in pairwise(spans)]
        native = [1e6 * (end - begin) for begin, end in spans]
        rows.append([streams, f"{statistics.median(gaps):.0f} ({min(gaps):.0f})",
                     f"{statistics.median(native):.0f} ({min(native):.0f})"])  # fmt: skip
    print(markdown_table(["streams", "host us", "native us"], rows))


if __name__ == "__main__":
    main()
