"""Whole decode steps by how the products of a layer are computed: `python -m benchmarks.lab.gemm_tables`.

A product alone, in a chain of its like, does not tell what it costs between a norm and an attention: the table that
ships (headrace/back/kernels/linear/tables) was chosen by these steps among the finalists of `benchmarks.h200.gemms`.
Kernels compile beside each other first. An H200 takes half a minute for a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from unittest.mock import patch

import torch

from benchmarks.h200 import chain
from headrace.back.kernels.linear import table
from headrace.back.kernels.linear.table import GemmPlan, Measured
from headrace.back.kernels.linear.triton_small import gemm_device_of
from headrace.back.kernels.triton.ahead import compiling

ROWS = {"8B": (2, 8, 16, 32), "0.6B": (2, 8, 32)}
LENGTH = 200
STREAMS = (((256, 4), (128, 4)), ((128, 5), (128, 3)), ((256, 2), (128, 2)), ((128, 8), (64, 8)))
"""Inputs of a step and stages, of plain and of gated products."""


def streamed(base: Measured, plain: tuple[int, int], gated: tuple[int, int]) -> Measured:
    """All products of a layer streamed; the head as it was."""
    found = {shape: dict(plans) for shape, plans in base.items()}
    for shape, plans in found.items():
        if shape.startswith(f"{chain.VOCABULARY}x"):
            continue
        k, stages = gated if shape.endswith("+act") else plain
        plan = GemmPlan(kernel="stream", n=64, k=k, warps=4, stages=stages)
        plans |= dict.fromkeys((2, 4, 8, 16, 32), plan)
    return found


def main() -> None:
    """See the module."""
    base = table.measured(gemm_device_of(torch.device("cuda", 0)))
    tables = {"shipped": base} | {f"stream {one}": streamed(base, *one) for one in STREAMS}
    for model in chain.MODELS:
        step = chain.Step(model)

        def us(of: Measured, rows: int, step: chain.Step = step) -> float:
            with patch.object(table, "measured", lambda device: of):
                return step.us("fused", rows, LENGTH)

        def once(calls: Iterable[Callable[[], object]]) -> list[object]:
            return [call() for call in calls]

        with (
            patch.object(chain, "graph_of", once),
            patch.object(chain, "replay_us", lambda graph, replays: 0.0),
            compiling(),
        ):
            for of in tables.values():
                us(of, ROWS[model.name][0])
                us(of, ROWS[model.name][-1])
        for rows in ROWS[model.name]:
            told = {name: round(us(of, rows), 1) for name, of in tables.items()}
            print(model.name, rows, told, flush=True)
        del step, us
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
