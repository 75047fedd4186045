"""Prompts through the recurrences alone, beside a plain scan in PyTorch: tokens per second of Mamba 2's recurrence and
of the gated delta rule, 1 x 8192 and 16 x 512 (KRN-13). `python -m benchmarks.h200.recurrent [--device cpu]`.

The scan is the op's reference, a token at a time; it runs over `SCANNED` tokens of one row, and its rate is theirs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.back.kernels.gated_delta.op import OP as GATED_DELTA
from headrace.back.kernels.gated_delta.op import GatedDeltaProblem
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.op import Op
from headrace.back.kernels.ssd_scan.op import OP as SSD_SCAN
from headrace.back.kernels.ssd_scan.op import SsdScanProblem

PROMPTS = ((1, 8192), (16, 512))
SCANNED = 128
REPEATS = 3


def problems(device: str) -> dict[str, tuple[Op[Any], Any]]:
    """The published shapes of Mamba 2 (2.7B's heads, eight groups) and of Qwen 3.5's gated delta nets."""
    new = {"device": device, "dtype": torch.bfloat16}
    ssd = SsdScanProblem(**new, heads=128, groups=8, head_dim=64, state_dim=128)
    delta = GatedDeltaProblem(**new, key_heads=16, heads=32, key_dim=128, value_dim=128)
    return {"ssd_scan": (SSD_SCAN, ssd), "gated_delta": (GATED_DELTA, delta)}


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
    """The best of some runs."""
    best = float("inf")
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shorter", type=int, default=1, help="divide the prompts' length by this")
    asked = parser.parse_args()
    print("| op | kernel | prompts | tok/s | plain scan tok/s | ratio |\n|---|---|---|---|---|---|")
    for name, (op, problem) in problems(asked.device).items():
        sample, choice = op.sample(problem), op.choose(problem)
        kernel, scan = (one.bind(problem, *sample.weights) for one in (choice.kernel, op.reference))
        once = prompts(sample.arguments, 1, SCANNED, asked.device)
        plain = SCANNED / seconds(lambda scan=scan, once=once: scan(*once), asked.device)
        for count, length in PROMPTS:
            length //= asked.shorter
            arguments = prompts(sample.arguments, count, length, asked.device)
            spent = seconds(lambda kernel=kernel, some=arguments: kernel(*some), asked.device)
            rate = count * length / spent
            print(
                f"| {name} | {choice.kernel.name} | {count} x {length} | {rate:,.0f} | {plain:,.0f} |"
                f" {rate / plain:.1f} |"
            )


if __name__ == "__main__":
    main()
