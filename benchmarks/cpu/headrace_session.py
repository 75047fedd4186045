"""headrace as one of the engines: the core and its worker in one process, driven step by step (bench/offline.py).

python -m benchmarks.cpu.headrace_session MODEL [--quantization int8] [--load-format auto]
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.cpu.answer import answer
from headrace.base.config.options import CommandLine
from headrace.bench.latency import decode_gaps
from headrace.bench.offline import OfflineEngine
from headrace.launch.facts import resolve_options

STEP_TOKENS = 2048
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "4096", "--kv-memory", "1GiB",
           "--no-prefix-caching", "--max-step-tokens", str(STEP_TOKENS), "--max-running", "32")  # fmt: skip


def main() -> None:
    line = CommandLine("session", "", groups=("model", "kv", "scheduler", "device"))
    random = [] if "--load-format" in sys.argv else ["--load-format", "dummy"]
    _, options = line.parse(["--model", *sys.argv[1:], *OPTIONS, *random])
    engine, rng = OfflineEngine(resolve_options(options)), np.random.default_rng(0)

    def run(streams: int, num_input: int, num_output: int) -> tuple[float, list[float]]:
        requests = [engine.request(rng, num_input, num_output, 0.0) for _ in range(streams)]
        trace = engine.run(requests)
        gaps = decode_gaps(trace, streams).tolist()
        return max(trace.first_s.values()) - trace.start_s, gaps or [float("nan")]

    answer(run, start_s=engine.start_s)
    engine.close()


if __name__ == "__main__":
    main()
