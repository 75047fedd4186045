"""The library's products under load, beside the clock and the power they leave:

    python -m benchmarks.h200.sustained [--out benchmarks/h200/results/sustained.json]

A chain over the weights of six 8B layers is replayed for a third of a second: the first replay finds a cool device, the
median one the clock that the board's power allows.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.h200.gemms import MODELS
from benchmarks.h200.shapes import BYTES_PER_S, FLOPS
from benchmarks.h200.where import Clocks
from headrace.back.kernels.triton.timing import graph_of, replay_us

LAYERS = 6
SECONDS = 0.35


def _product(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, *, add: bool) -> object:
    return y.addmm_(x, weight.t()) if add else F.linear(x, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also every sample of clock and power, as JSON")
    out = parser.parse_args().out
    clocks, rows = Clocks(), []
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for tokens in (128, 256, 2048, 8192):
        for name, shape in MODELS["8B"].items():
            if name == "head":
                continue
            size = shape.outputs, shape.inputs
            weights = [torch.randn(*size, **new).mul_(size[1] ** -0.5) for _ in range(LAYERS)]
            x, y = torch.randn(tokens, size[1], **new), torch.randn(tokens, size[0], **new)
            graph = graph_of([partial(_product, x, y, w, add=shape.add) for w in weights])
            row: dict[str, Any] = {}
            graph.replay()
            with clocks.sampled(row, trace=out is not None):
                times, begin = [], time.perf_counter()
                while time.perf_counter() - begin < SECONDS:
                    times.append(replay_us(graph, replays=1) / LAYERS)
            us, work = sorted(times)[len(times) // 2], 2 * tokens * size[0] * size[1]
            moved = 2 * (size[0] * size[1] + tokens * sum(size))
            floor = 1e6 * max(work / FLOPS, moved / BYTES_PER_S)
            trace = row.pop("trace", None)
            rows.append({"gemm": name, "tokens": tokens, "us": us, **row, "mhz_watts": trace})
            print(
                f"{name} {tokens}: first {times[0]:.1f}, median {us:.1f} us, floor {floor:.1f}, "
                f"{work / us / 1e6:.0f} TFLOP/s, {row}",
                flush=True,
            )
    if out is not None:
        report = {"device": torch.cuda.get_device_name(), "rows": rows}
        out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
