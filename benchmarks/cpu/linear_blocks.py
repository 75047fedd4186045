"""Products with block-quantized weights (GGUF types): beside the int8 and int4 of `--quantization`, and plain reading.

    PYTHONPATH=. python benchmarks/cpu/linear_blocks.py --threads 2

Each shape cycles through enough weights to leave the caches.
"""

from __future__ import annotations

from functools import partial

import torch
from linear import WEIGHT_BYTES
from measure import interleaved, row, setup
from products import weight

from headrace.back.kernels.probe.native import reader

SHAPES = ((1024, 4096), (3072, 1024))  # inputs, outputs
ROWS = (1, 4, 16, 64)
BESIDE = {
    "Q8_0": "int8",
    "Q4_0": "int4",
    "Q4_K": "int4",
    "Q5_K": "int4",
    "Q6_K": "int8",
    "IQ4_XS": "int4",
}


def cycled(made, start):
    """A callable that uses the next product on each call."""
    state = [start * len(made) // 3]

    def call(x):
        state[0] = (state[0] + 1) % len(made)
        return made[state[0]](x)

    return call


def main() -> None:
    library, arguments = setup(__doc__)
    row("type", "inputs x outputs", "rows", "blocks us", "int us", "beside", "blocks / int", "read us")  # fmt: skip
    row(*["---"] * 8)
    for name, beside in BESIDE.items():
        for inputs, outputs in SHAPES:
            count = -(-WEIGHT_BYTES // (inputs * outputs // 2))
            ours = [weight(library, name, inputs, outputs) for _ in range(count)]
            theirs = [weight(library, beside, inputs, outputs) for _ in range(count)]
            readers = [reader(library, data) for _, data in ours]
            calls = {
                "blocks": cycled([product for product, _ in ours], 0),
                "int": cycled([product for product, _ in theirs], 1),
                "read": cycled([lambda x, read=read: read() for read in readers], 2),
            }
            for rows in ROWS:
                x = torch.randn(rows, inputs).bfloat16()
                timed = interleaved(
                    {n: partial(call, x) for n, call in calls.items()}, seconds=arguments.seconds
                )
                best = {n: low for n, (_, low) in timed.items()}
                row(name, f"{inputs} x {outputs}", rows, f"{best['blocks']:,.0f}", f"{best['int']:,.0f}",
                    beside, f"{best['blocks'] / best['int']:.2f}", f"{best['read']:,.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
