"""What the machine gives at this moment: reads per second and products per second, on the pool's threads.

The buffer of a reading is as large as the weights a step reads: what a shared last-level cache keeps of the one, it
keeps of the other. A product's peak is the better of ours and torch's on one large product.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from headrace.back.kernels.linear.op import OP, LinearProblem
from headrace.back.kernels.linear_quant.op import OP as OP_QUANT
from headrace.back.kernels.linear_quant.op import LinearQuantProblem, random_weight
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.probe.native import read_gb_per_s

ROWS, WIDTH = 1024, 4096


def pool(threads: int) -> NativeLibrary:
    """The native library with so many threads, torch with as many."""
    library = load()
    assert isinstance(library, NativeLibrary), library
    library.set_threads(threads)
    torch.set_num_threads(threads)
    return library


def reading(library: NativeLibrary, read_bytes: int) -> float:
    """10^9 bytes per second, the best of a few readings."""
    return read_gb_per_s(library, read_bytes=read_bytes, rounds=4)


def peaks() -> dict[str, float]:
    """10^9 operations per second of a large product: "bf16", and "int8", which int4's codes become."""
    weight = torch.randn(WIDTH, WIDTH).bfloat16()
    x = torch.randn(ROWS, WIDTH).bfloat16()
    dense = LinearProblem(device="cpu", dtype=torch.bfloat16, inputs=WIDTH, outputs=WIDTH)
    quantized = LinearQuantProblem(device="cpu", dtype=torch.bfloat16, inputs=WIDTH, outputs=WIDTH)
    ours = OP.choose(dense).bind(weight, None)
    ours8 = OP_QUANT.choose(quantized).bind(
        random_weight(quantized, torch.Generator().manual_seed(0)), None
    )
    codes_x, codes_w = (t.to(torch.int8) for t in (x, weight.t()))
    candidates: dict[str, tuple[Callable[[], object], ...]] = {
        "bf16": (lambda: ours(x), lambda: torch.nn.functional.linear(x, weight)),
        "int8": (lambda: ours8(x), lambda: torch._int_mm(codes_x, codes_w)),
    }
    return {name: max(_rate(call) for call in calls) for name, calls in candidates.items()}


def _rate(call: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - begin)
    return 2 * ROWS * WIDTH * WIDTH / best_s / 1e9
