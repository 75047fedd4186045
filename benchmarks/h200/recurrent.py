"""Prompts through the recurrences alone, kernel beside kernel: microseconds and tokens per second of the gated delta
rule, with a gate for each head and for each channel, and of Mamba 2's recurrence, 1 x 8192 and 16 x 512, beside the
floor and a plain scan in PyTorch (KRN-13). `python -m benchmarks.h200.recurrent [--device cpu]`.

The floor is the larger of what the arguments take at the memory's rate, read and written once, and what the products of
chunks of 64 tokens take on the matrix units. The scan is the op's reference, a token at a time; it runs over `SCANNED`
tokens of one row, and its rate is theirs. Kernels that fail their self-check are named with the reason.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.back.kernels.gated_delta.op import OP as GATED_DELTA
from headrace.back.kernels.gated_delta.op import GatedDeltaProblem
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.op import Kernel, Op, load_kernel
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScanProblem

PROMPTS = ((1, 8192), (16, 512))
SCANNED = 128
REPEATS = 5
CHUNK = 64
BYTES_PER_S = 4.346e12
PRODUCTS_PER_S = 795e12
"""Measured rates of an H200 (README.md)."""


def problems(device: str) -> dict[str, tuple[Op[Any], Any]]:
    """The published shapes of Qwen 3.5's gated delta nets, of Kimi-Linear, and of Mamba 2 (2.7B's heads, eight
    groups)."""
    new = {"device": device, "dtype": torch.bfloat16}
    sizes = {"heads": 32, "key_dim": 128, "value_dim": 128}
    delta = GatedDeltaProblem(**new, **sizes, key_heads=16)
    kimi = GatedDeltaProblem(**new, **sizes, key_heads=32, per_channel=True)
    ssd = SsdScanProblem(**new, heads=128, groups=8, head_dim=64, state_dim=128)
    return {
        "gated_delta": (GATED_DELTA, delta),
        "gated_delta, per channel": (GATED_DELTA, kimi),
        "ssd_scan": (SSD_SCAN, ssd),
    }


def flops(problem: Any) -> int:
    """Operations of one token in products of chunks; the inverse of the delta rule's triangle not counted."""
    if isinstance(problem, SsdScanProblem):
        n, p = problem.state_dim, problem.head_dim
        return 2 * problem.heads * (CHUNK * n + CHUNK * p + 2 * n * p)
    k, v = problem.key_dim, problem.value_dim
    return 2 * problem.heads * (3 * CHUNK * k + 2 * CHUNK * v + 3 * k * v)


def floor_us(problem: Any, arguments: tuple[Any, ...], tokens: int) -> float:
    """See the module."""
    *inputs, state, rows = arguments
    heads_of_y = inputs[0] if isinstance(problem, SsdScanProblem) else inputs[2]
    moved = sum(one.numel() * one.element_size() for one in (*inputs, heads_of_y))
    moved += 2 * len(rows.row_R) * math.prod(state.shape[1:]) * 4
    return 1e6 * max(moved / BYTES_PER_S, tokens * flops(problem) / PRODUCTS_PER_S)


def prompts(sample: tuple[Any, ...], count: int, length: int, device: str) -> tuple[Any, ...]:
    """Arguments like the sample's for `count` prompts of `length` tokens each."""
    *inputs, state, _ = sample
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    rows = ScanRows(
        row_R=torch.arange(count, dtype=torch.int32, device=device),
        query_start_R1=starts,
        decode=False,
    )
    states = torch.zeros(count + 1, *state.shape[1:], device=device)
    tokens = (random(count * length, *one.shape[1:], dtype=one.dtype) for one in inputs)
    return (*tokens, states, rows)


def seconds(call: Callable[[], object], device: str) -> float:
    """The best of some runs, by the device's clock."""
    best = float("inf")
    for _ in range(REPEATS + 1):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - began)
    return best


def kernels_of(op: Op[Any], problem: Any) -> list[Kernel[Any]]:
    """Those that take the problem; the others are printed with their reasons."""
    found = []
    for target in op.kernels:
        kernel = load_kernel(target)
        if isinstance(kernel, str) or kernel.supports(problem) is not None:
            continue
        reasons = op.failures(kernel, problem)
        if reasons:
            print(f"{op.name}: {kernel.name}: {reasons}", flush=True)
        else:
            found.append(kernel)
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shorter", type=int, default=1, help="divide the prompts' length by this")
    asked = parser.parse_args()
    print(
        "| op | kernel | prompts | us | tok/s | floor, us | share of it | plain scan tok/s | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, (op, problem) in problems(asked.device).items():
        sample = op.sample(problem)
        scan = op.reference.bind(problem, *sample.weights)
        once = prompts(sample.arguments, 1, SCANNED, asked.device)
        plain = SCANNED / seconds(lambda scan=scan, once=once: scan(*once), asked.device)
        for count, length in PROMPTS:
            tokens = count * (length // asked.shorter)
            arguments = prompts(sample.arguments, count, length // asked.shorter, asked.device)
            floor = floor_us(problem, arguments, tokens)
            for kernel in kernels_of(op, problem):
                bound = kernel.bind(problem, *sample.weights)
                spent = seconds(lambda bound=bound, some=arguments: bound(*some), asked.device)
                us = 1e6 * spent
                print(
                    f"| {name} | {kernel.name} | {count} x {length} | {us:,.0f} | {tokens / spent:,.0f} |"
                    f" {floor:.0f} | {100 * floor / us:.0f} % | {plain:,.0f} |"
                    f" {tokens / spent / plain:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
