"""Layers with weights of 8 and 4 bits whose inputs become int8 (W8A8, W4A8), beside inputs as they are and beside
bfloat16 weights, on one GPU.

    python -m benchmarks.h200.int8_rows --out int8_rows.json
    python -m benchmarks.h200.int8_rows --write int8_rows.json      prints its table

The layers of Qwen3-8B without norms and activations, each over so many weights that no cache helps; a figure is
the sum over the layers of one decoder layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.h200.shapes import device_name
from headrace.back.kernels.linear_int4 import op as int4
from headrace.back.kernels.linear_int4 import triton_linear_int4
from headrace.back.kernels.linear_int8 import op as int8
from headrace.back.kernels.linear_int8 import triton_linear_int8
from headrace.back.kernels.triton.timing import copies, each_us
from headrace.bench.report import markdown_table, versions

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = (1, 32, 64, 128, 256, 512, 1024, 4096, 16384)
TURNS = 3
Call = Callable[[torch.Tensor], torch.Tensor]


def ways(outputs: int, inputs: int) -> dict[str, list[Call]]:
    """Each way to multiply, over several weights."""
    calls: dict[str, list[Call]] = {}
    size = {"device": "cuda", "dtype": torch.bfloat16, "outputs": outputs, "inputs": inputs}
    for name, op, kernel, group in (
        ("w8", int8, triton_linear_int8, None),
        ("w4", int4, triton_linear_int4, 128),
    ):
        for rows in (False, True):
            form = {8: int8.LinearInt8Problem, 4: int4.LinearInt4Problem}[int(name[1])]
            problem = form(**size, group=group, int8_rows=rows)
            weight, *_ = op.sample_of(problem, (1,)).weights
            count = copies(weight.num_bytes)
            some = [weight] + [_copy(weight) for _ in range(count - 1)]
            calls[f"{name}a{8 if rows else 16}"] = [
                kernel.KERNEL.bind(problem, one, None) for one in some
            ]
    plain = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    some = [plain] + [plain.clone() for _ in range(copies(plain.nbytes) - 1)]
    calls["bf16"] = [lambda x, w=one: F.linear(x, w) for one in some]
    return calls


def _copy(weight: Any) -> Any:
    """Another of the same numbers."""
    return replace(
        weight,
        **{
            name: value.clone()
            for name, value in vars(weight).items()
            if isinstance(value, torch.Tensor)
        },
    )


def measure() -> list[dict[str, Any]]:
    """Microseconds of a decoder layer's four GEMMs, by way and tokens: medians of turns."""
    total: dict[tuple[str, int], float] = {}
    for layer, (outputs, inputs) in LAYERS.items():
        calls = ways(outputs, inputs)
        for tokens in TOKENS:
            x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(TURNS):
                for name, some in calls.items():
                    times[name].append(each_us([lambda run=run, x=x: run(x) for run in some]))
            for name, us in times.items():
                total[name, tokens] = total.get((name, tokens), 0.0) + statistics.median(us)
        print(layer, {key: round(us, 1) for key, us in total.items()}, flush=True)
        del calls
        torch.cuda.empty_cache()
    return [{"way": name, "tokens": tokens, "us": us} for (name, tokens), us in total.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each number of tokens."""
    names = list(dict.fromkeys(row["way"] for row in rows))
    found = {(row["way"], row["tokens"]): row["us"] for row in rows}
    tokens = sorted({row["tokens"] for row in rows})
    lines = [[n, *(f"{found[name, n]:,.1f}" for name in names)] for n in tokens]
    return markdown_table(("tokens", *(f"{name}, us" for name in names)), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, help="results whose table is printed")
    given = parser.parse_args()
    if given.write:
        print(table(json.loads(given.write.read_text())["rows"]))
        return
    rows = measure()
    if given.out:
        given.out.write_text(json.dumps({"versions": versions() | device_name(), "rows": rows}))
    print(table(rows))


if __name__ == "__main__":
    main()
