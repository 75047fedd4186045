"""What a prompt's prefill is made of: seconds in each native kernel, and in none: before the first (the core admits,
plans and hands over), between them (Python, torch), behind the last (the result is read and taken over).

    python -m benchmarks.cpu.prompt [--shape bundled] [--quantization int4] [--tokens 512]

Kernels are timed around their calls in this process, which adds some 0.3 us to each. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from benchmarks.cpu.headrace_session import OPTIONS
from benchmarks.cpu.shapes import SHAPES
from headrace.back.kernels.native.library import NativeLibrary
from headrace.base.config.options import CommandLine
from headrace.bench.offline import OfflineEngine
from headrace.bench.report import markdown_table
from headrace.launch.facts import resolve_options

ROUNDS = 8
spent: Counter[str] = Counter()
moments: list[float] = []
"""When the kernels of a prompt began and ended, by turns."""


def timed(bind: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """`NativeLibrary.bind` with a clock around what it binds."""

    def bound(library: NativeLibrary, name: str, *types: type) -> Callable[..., None]:
        kernel = bind(library, name, *types)

        def call(*arguments: object) -> None:
            began = time.perf_counter()
            kernel(*arguments)
            moments.extend((began, time.perf_counter()))
            spent[name] += moments[-1] - began

        return call

    return bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="bundled", choices=SHAPES)
    parser.add_argument("--quantization", default="", help="none: bfloat16")
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    NativeLibrary.bind = timed(NativeLibrary.bind)
    line = CommandLine("prompt", "", groups=("model", "kv", "scheduler", "device"))
    words = ["--model", str(SHAPES[given.shape].folder), *OPTIONS]
    words += ["--quantization", given.quantization] if given.quantization else []
    _, options = line.parse(words)
    engine, rng = OfflineEngine(resolve_options(options)), np.random.default_rng(0)
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        spent.clear()
        moments.clear()
        trace = engine.run([engine.request(rng, given.tokens, 1, 0.0)])
        gaps = [begin - end for end, begin in zip(moments[1:-1:2], moments[2::2], strict=True)]
        rounds.append({
            **spent, "all": trace.wall_s, "before the first kernel": moments[0] - trace.start_s,
            "between kernels": sum(gaps), "behind the last kernel": trace.end_s - moments[-1],
        })  # fmt: skip
    engine.close()
    names = sorted(rounds[-1], key=lambda name: -rounds[-1][name])
    found = {
        name: 1e3 * statistics.median(one.get(name, 0.0) for one in rounds[2:]) for name in names
    }
    print(markdown_table(["part", "ms"], [[name, f"{ms:.2f}"] for name, ms in found.items()]))


if __name__ == "__main__":
    main()
