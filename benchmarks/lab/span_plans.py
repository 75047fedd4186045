"""What attention inside long spans costs by each kernel, a new length for the first time and after: CUDA alone.

    python -m benchmarks.lab.span_plans --out $OUT/span_plans.json [--seconds 90]

Qwen3-VL-8B's tower: 16 heads of 72, bfloat16, one span (or several of one length). For each length, in a fresh state of
that length: the first call, the second, the median of eight more. cuDNN makes a plan for each shape; the last rows
call lengths that were seen before, in turn, so that a lost plan shows. `recorded`: a call replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.shapes import device_name
from headrace.back.kernels.span_attention import library_spans, op, triton_spans

HEADS, WIDTH = 16, 72
NEW = (1024, 1040, 1536, 2040, 2048, 3060, 4096, 4100, 6120, 8160, 8192, 12240, 16384)
"""Lengths; 8,160: 1920 x 1080 pixels."""


def timed(call: Any) -> float:
    """Milliseconds of one call, the host's work included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def inputs(spans: int, length: int, split: bool) -> tuple[Any, Any, Any, list[int]]:
    """q, k, v as a tower gives them (`split`: parts of one tensor), and the starts."""
    tokens = spans * length
    if split:
        qkv = torch.randn(tokens, 3 * HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
        q, k, v = (one.unflatten(1, (HEADS, WIDTH)) for one in qkv.chunk(3, dim=1))
    else:
        q, k, v = (
            torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
    return q, k, v, [i * length for i in range(spans + 1)]


def row_of(attend: Any, spans: int, length: int, expected: Any = None) -> dict[str, Any]:
    """A length for the first time."""
    q, k, v, starts = inputs(spans, length, True)
    first = timed(lambda: attend(q, k, v, starts))
    second = timed(lambda: attend(q, k, v, starts))
    later = sorted(timed(lambda: attend(q, k, v, starts)) for _ in range(8))[4]
    flops = 4 * spans * length**2 * HEADS * WIDTH
    row = {"first_ms": first, "second_ms": second, "ms": later, "tflops": flops / later / 1e9}
    if expected is not None:
        want = expected(q, k, v, starts).float()
        row["off"] = float((attend(q, k, v, starts).float() - want).abs().max() / want.abs().max())
    return {name: round(value, 4) for name, value in row.items()}


def recorded_ms(attend: Any, length: int) -> float | str:
    """A call in a graph."""
    q, k, v, starts = inputs(1, length, True)
    graph = torch.cuda.CUDAGraph()
    try:
        attend(q, k, v, starts)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            attend(q, k, v, starts)
        return round(sorted(timed(graph.replay) for _ in range(8))[4], 4)
    except RuntimeError as error:
        return f"{error!s:.150}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    problem = op.SpanAttentionProblem(
        device="cuda", dtype=torch.bfloat16, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH, scale=WIDTH**-0.5
    )  # fmt: skip
    kernels = (triton_spans.KERNEL, library_spans.CUDNN, library_spans.FLASH)
    bound = {one.name: one.bind(problem) for one in kernels}
    result: dict[str, Any] = {"device": device_name(), "new": [], "again": {}, "recorded": {}}

    def keep(row: dict[str, Any]) -> None:
        result["new"].append(row)
        print(json.dumps(row), flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1))

    for spans, length in [(1, n) for n in NEW] + [(4, 1024), (4, 1028), (16, 256), (3, 4096)]:
        if time.monotonic() > end:
            break
        row: dict[str, Any] = {"spans": spans, "length": length}
        for name, attend in bound.items():
            try:
                row[name] = row_of(
                    attend, spans, length, bound["triton"] if name != "triton" else None
                )
            except RuntimeError as error:
                row[name] = f"{error!s:.150}"
        keep(row)
    for name, attend in bound.items():
        if time.monotonic() > end:
            break
        cases = [inputs(1, length, True) for length in NEW[:10]]
        try:
            for case in cases:
                attend(*case)
            result["again"][name] = [round(timed(partial(attend, *case)), 4) for case in cases]
        except RuntimeError as error:
            result["again"][name] = f"{error!s:.150}"
        result["recorded"][name] = {
            length: recorded_ms(attend, length) for length in (1024, 4096, 8160)
        }
    print(json.dumps({name: result[name] for name in ("again", "recorded")}), flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
