"""Gated products of many tokens under load, the library's and ours, beside the clock and the power they leave:
`python -m benchmarks.lab.wide OUT`.

The shapes are those of 8B, of a half of it (two devices) and of 0.6B. OUT receives the figures and the plans that ship
(headrace/back/kernels/linear/tables). Then whole steps of 8B, with these plans and with the library's, in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.h200.gemms import MODELS
from benchmarks.h200.offline import make_engine, prefill
from benchmarks.h200.shapes import write_model
from benchmarks.h200.where import Clocks
from headrace.back.kernels.linear import table
from headrace.back.kernels.linear.table import GemmPlan, Measured
from headrace.back.kernels.linear.triton_small import Gemm, gemm_device_of, launcher
from headrace.back.kernels.linear.tune import LARGE, GemmTrial, candidates, loaded_us
from headrace.bench.latency import latency

SHAPES = {
    "8B": MODELS["8B"]["gate_up"],
    "8B, one of two": replace(MODELS["8B"]["gate_up"], outputs=12288),
    "0.6B": MODELS["0.6B"]["gate_up"],
}


def error_of(trial: GemmTrial, plan: GemmPlan, tokens: int) -> float:
    """Relative distance from the product in float32."""
    weight, x = trial.weights[0], trial.x[:tokens]
    y = torch.full((tokens, len(weight) // 2), float("nan"), device=x.device, dtype=x.dtype)
    launcher(Gemm(weight_OI=weight, activation="silu"), plan, tokens)(x, y)
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=1)
    expected = F.silu(gate) * up
    return float((y.float() - expected).norm() / expected.norm())


def measured(trial: GemmTrial, tokens: int, clocks: Clocks) -> tuple[list[dict[str, Any]], Any]:
    """A row for the library and one for each candidate, and the plan to keep."""
    chains: list[tuple[GemmPlan | None, Any]] = [(None, trial.library(tokens))]
    chains += [(plan, trial.ours(plan, tokens)) for plan in candidates(trial.shape, tokens)]
    rows = []
    for plan, calls in chains:
        row: dict[str, Any] = {"tokens": tokens, "m": 0, "group": 0, "error": 0.0}
        if plan is not None:
            row |= {"m": plan.m, "group": plan.group, "error": error_of(trial, plan, tokens)}
            assert row["error"] < 4e-3, row
        with clocks.sampled(row):
            row["us"] = loaded_us(calls)
        work = 2 * tokens * trial.shape.outputs * trial.shape.inputs
        row["tflops"] = work / row["us"] / 1e6
        rows.append(row)
    best = min(range(len(rows)), key=lambda i: rows[i]["us"])
    return rows, chains[best][0]


def steps(turns: int) -> Iterator[dict[str, Any]]:
    """Steps of 8B by engines one after the other, with the plans that ship and with the library from 65 tokens on: a
    row for each engine."""
    ours = table.measured(gemm_device_of(torch.device("cuda", 0)))
    library = {key: plans | dict.fromkeys(LARGE) for key, plans in ours.items()}
    for turn in range(2 * turns):
        name, of = (("ours", ours), ("library", library))[turn % 2]
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(table, "measured", lambda _, of=of: of),
        ):
            engine = make_engine(write_model(Path(folder), "qwen3-8b"), kv_memory="16GiB")
            row: dict[str, Any] = {"products": name}
            for batch in (128, 256):
                run = latency(
                    engine, batch_size=batch, input_len=128, output_len=128, iterations=1, warmup=1
                )
                row[f"{batch} x 128, ms"] = run["decode_step_ms"]
            row |= {
                f"{one['batch']} x {one['prompt']}, tok/s": one["tok_s"]
                for one in prefill(engine, "qwen3-8b")
            }
            engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        yield row


def products(out: Path) -> None:
    """The figures, and the table of what was fastest."""
    clocks = Clocks()
    found: Measured = {}
    for name, shape in SHAPES.items():
        trial = GemmTrial(shape, torch.bfloat16)
        plans = found.setdefault(shape.key, {})
        for tokens in trial.sizes:
            rows, plans[tokens] = measured(trial, tokens, clocks)
            with (out / "wide.jsonl").open("a") as file:
                file.writelines(json.dumps({"shape": name, **row}) + "\n" for row in rows)
            cells = (
                f"{row['m'] or 'library'}{'/' + str(row['group']) if row['m'] else ''}: {row['us']:.1f} us, "
                f"{row['tflops']:.0f} TFLOP/s, {row.get('mhz', 0):.0f} MHz, {row.get('watts', 0):.0f} W"
                for row in rows
            )
            print(f"{name} {tokens}: " + "; ".join(cells), flush=True)
        del trial
        torch.cuda.empty_cache()
    table.write(out / "wide.json", gemm_device_of(torch.device("cuda", 0)), found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="products,steps")
    given = parser.parse_args()
    if "products" in given.parts:
        products(given.out)
    if "steps" in given.parts:
        for row in steps(turns=2):
            with (given.out / "steps.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
