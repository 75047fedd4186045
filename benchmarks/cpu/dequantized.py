"""Many rows by block-quantized weights, one thread: quantized to int8, and as they are by
dequantized weights; from how many rows on the latter is faster, per layout.

    PYTHONPATH=. python benchmarks/cpu/dequantized.py [--only int4-g32,Q4_K] [--seconds 1]

Microseconds of the thread's own time, the two in turn over four weights: the 10th percentile of each, and the ratio.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from measure import row, setup

from headrace.back.kernels.linear_blocks import native, native_dequantized, op

SHAPE = (1024, 4096)  # inputs, outputs
ROWS = (32, 48, 64, 128, 512)
NAMES = "int4-g32,int4-g64,int4-g128,int8-g32,Q8_0,Q4_K,Q6_K,IQ4_XS"


def in_turn(pairs, x, seconds):
    """Of each of two kernels: microseconds. `pairs`: both with one weight after another."""
    taken, end, turn = ([], []), time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 8:
        for times, product in zip(taken, pairs[turn % len(pairs)], strict=True):
            start = time.thread_time()
            product(x)
            times.append((time.thread_time() - start) * 1e6)
        turn += 1
    return [sorted(times)[len(times) // 10] for times in taken]


def main() -> None:
    """Prints a table."""
    library, given = setup(__doc__)
    inputs, outputs = SHAPE
    row("layout", *(f"{rows} rows" for rows in ROWS))
    row(*["---"] * (1 + len(ROWS)))
    for name in (given.only or NAMES).split(","):
        asked = op.LinearBlocksProblem(
            device="cpu", dtype=torch.bfloat16, inputs=inputs, kinds=((name, outputs),)
        )
        weights = [op.random_weight(asked, torch.Generator().manual_seed(i)) for i in range(4)]
        dequantized = replace(asked, plain_from=1)
        pairs = [
            (
                native.bind_with(library, asked, weight, None),
                native_dequantized.bind_with(library, dequantized, weight, None),
            )
            for weight in weights
        ]
        cells = []
        for rows in ROWS:
            codes, wide = in_turn(pairs, torch.randn(rows, inputs).bfloat16(), given.seconds)
            cells.append(f"{codes:,.0f} / {wide:,.0f} = {codes / wide:.2f}")
        row(name, *cells)


if __name__ == "__main__":
    main()
