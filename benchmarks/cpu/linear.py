"""Skinny linear layers: native against torch's linear and oneDNN with packed weights, beside the bandwidth of the run.

Each shape cycles through enough weights to leave the caches, as the layers of a model do.
"""

from __future__ import annotations

import torch
from measure import cell, interleaved, row, setup

from headrace.back.kernels.linear import mkldnn, native
from headrace.back.kernels.linear.op import LinearProblem, bind_reference
from headrace.back.kernels.probe.native import read_gb_per_s

SHAPES = ((1024, 4096), (1024, 6144), (3072, 1024), (4096, 11008))  # inputs, outputs
ROWS = (1, 2, 4, 8, 16, 32, 64)
WEIGHT_BYTES = 128 << 20


def cycle(bind, problem, weights):
    """A callable that uses the next weight on each call."""
    bound = [bind(problem, weight, None) for weight in weights]
    state = [0]

    def call(x):
        state[0] = (state[0] + 1) % len(bound)
        return bound[state[0]](x)

    return call


def main() -> None:
    library, arguments = setup(__doc__)
    row("dtype", "inputs x outputs", "rows", "native us", "torch us", "packed us", "native GB/s", "read GB/s",
        "share", "GFLOP/s")  # fmt: skip
    row(*["---"] * 10)
    for dtype in (torch.bfloat16, torch.float32):
        for inputs, outputs in SHAPES:
            weight_bytes = inputs * outputs * dtype.itemsize
            weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(-(-WEIGHT_BYTES // weight_bytes))]
            problem = LinearProblem(device="cpu", dtype=dtype, inputs=inputs, outputs=outputs)
            calls = {
                "native": cycle(lambda *a: native.bind_with(library, *a), problem, weights),
                "torch": cycle(bind_reference, problem, weights),
            }
            if mkldnn.KERNEL.supports(problem) is None:
                calls["packed"] = cycle(mkldnn.KERNEL.bind, problem, weights)
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                bound = read_gb_per_s(library, rounds=2)
                taken = interleaved(
                    {name: lambda call=call, x=x: call(x) for name, call in calls.items()},
                    seconds=arguments.seconds,
                )
                best_us = taken["native"][1]
                bound = max(bound, read_gb_per_s(library, rounds=2))
                rate = weight_bytes / best_us / 1e3
                row(str(dtype)[6:], f"{inputs} x {outputs}", rows, cell(taken["native"]), cell(taken["torch"]),
                    cell(taken["packed"]) if "packed" in taken else "-", f"{rate:.1f}", f"{bound:.1f}",
                    f"{rate / bound:.0%}", f"{2 * rows * inputs * outputs / best_us / 1e3:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
