"""Whole decode steps with one attention kernel and with another, in turn, in one engine: each turn records the steps'
graph anew, and turns go there and back, since contexts grow meanwhile.

    python -m benchmarks.lab.attention_steps --shape qwen3-8b --batches 1,8,32,128,256 [--variants]

Microseconds of a step, median of all turns: "splits" by the kernel with a program per KV split, "chosen" by what
kernels/attention/hopper_decode.py chooses for so many rows, else the KV heads of a tile and the stages of the kernel
that streams the cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.h200.offline import make_engine
from benchmarks.h200.shapes import write_model
from benchmarks.lab.decode_streams import VARIANTS
from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.attention import hopper_decode
from headrace.bench.offline import OfflineEngine

CHOSEN = {"splits": (1 << 30, hopper_decode.STREAMS), "chosen": (1, hopper_decode.STREAMS)}
TRIED = {f"{one.heads}, {one.stages}": (1, ((1 << 30, one),)) for one in VARIANTS}
STEPS, ROUNDS = 24, 2
KEPT: list[object] = []
"""Graphs of earlier turns, one of which may still run when it is exchanged."""


@contextmanager
def kernel(engine: OfflineEngine, name: str) -> Iterator[None]:
    """Within it the engine's steps attend so."""
    assert isinstance(engine.executor, InlineExecutor)
    graphs = engine.executor._resident.runner._steps._replay
    KEPT.append(dict(graphs._graphs))
    graphs._graphs.clear()
    graphs._seen.clear()
    least, streams = (CHOSEN | TRIED)[name]
    with patch.multiple(hopper_decode, LEAST_ROWS=least, STREAMS=streams):
        yield


def turns(engine: OfflineEngine, names: list[str], batch: int, prompt: int) -> dict[str, float]:
    """Microseconds of a step that decodes, by what attends."""
    rng, us = np.random.default_rng(1), {name: [] for name in names}
    for _ in range(batch):
        length = ROUNDS * len(names) * (STEPS + 4) + 8
        engine.core.add(engine.request(rng, prompt, length, 0.0))
    while len(engine.core.scheduler.queue) or engine.core.scheduler.prefilling:
        engine.core.step(wait=True)
    for i_round in range(ROUNDS):
        for name in names if i_round % 2 == 0 else reversed(names):
            with kernel(engine, name):
                for _ in range(4):
                    engine.core.step(wait=True)
                begin = time.perf_counter()
                for _ in range(STEPS):
                    engine.core.step(wait=True)
                us[name].append((time.perf_counter() - begin) / STEPS * 1e6)
    engine.core.abort([request.id for request in engine.core.requests])
    while engine.core.has_work:
        engine.core.step(wait=True)
    return {name: round(float(np.median(took)), 1) for name, took in us.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--variants", action="store_true")
    given = parser.parse_args()
    names = ["splits", *TRIED] if given.variants else list(CHOSEN)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(write_model(Path(folder), given.shape))
    for batch in map(int, given.batches.split(",")):
        row = {"shape": given.shape, "batch": batch, "prompt": given.prompt}
        print(json.dumps(row | turns(engine, names, batch, given.prompt)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
