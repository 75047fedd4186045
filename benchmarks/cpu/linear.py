"""Skinny linear layers: native against torch's linear, oneDNN with packed weights, and plain reading of as many bytes.

Each shape cycles through enough weights to leave the caches, as the layers of a model do.
"""

from __future__ import annotations

import torch
from measure import cell, interleaved, row, setup

from headrace.back.kernels.linear import mkldnn, native
from headrace.back.kernels.linear.op import LinearProblem, bind_reference
from headrace.back.kernels.probe.native import reader

SHAPES = ((1024, 4096), (1024, 6144), (3072, 1024), (4096, 11008))  # inputs, outputs
ROWS = (1, 2, 4, 8, 16, 32, 64)
WEIGHT_BYTES = 128 << 20


def cycle(bind, problem, weights, start):
    """A callable that uses the next weight on each call.

    Candidates start at different weights: one that follows another on the same weight would find it in the cache.
    """
    bound = [bind(problem, weight) for weight in weights]
    state = [start * len(weights) // 4]

    def call(x):
        state[0] = (state[0] + 1) % len(bound)
        return bound[state[0]](x)

    return call


def main() -> None:
    library, arguments = setup(__doc__)
    row("dtype", "inputs x outputs", "rows", "native us", "torch us", "packed us", "read us",
        "share of reading", "GFLOP/s")  # fmt: skip
    row(*["---"] * 9)
    for dtype in (torch.bfloat16, torch.float32):
        for inputs, outputs in SHAPES:
            weight_bytes = inputs * outputs * dtype.itemsize
            weights = [
                torch.randn(outputs, inputs).to(dtype)
                for _ in range(-(-WEIGHT_BYTES // weight_bytes))
            ]
            problem = LinearProblem(device="cpu", dtype=dtype, inputs=inputs, outputs=outputs)
            plain = {
                "native": lambda problem, weight: native.bind_with(library, problem, weight, None),
                "torch": lambda problem, weight: bind_reference(problem, weight, None),
                "read": lambda problem, weight: lambda x, read=reader(library, weight): read(),
            }
            if mkldnn.KERNEL.supports(problem) is None:
                plain["packed"] = lambda problem, weight: mkldnn.KERNEL.bind(problem, weight, None)
            calls = {
                name: cycle(bind, problem, weights, start)
                for start, (name, bind) in enumerate(plain.items())
            }
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                taken = interleaved(
                    {name: lambda call=call, x=x: call(x) for name, call in calls.items()},
                    seconds=arguments.seconds,
                )
                flop = 2 * rows * inputs * outputs
                row(str(dtype)[6:], f"{inputs} x {outputs}", rows, cell(taken["native"]), cell(taken["torch"]),
                    cell(taken["packed"]) if "packed" in taken else "-", cell(taken["read"]),
                    f"{taken['read'][1] / taken['native'][1]:.0%}",
                    f"{flop / taken['native'][1] / 1e3:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
