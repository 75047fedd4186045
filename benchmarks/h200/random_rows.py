"""Op `sample` alone on one H200: microseconds by rows, parameters and shape of the logits, beside the argmax.

    python -m benchmarks.h200.random_rows --out benchmarks/h200/results/random-rows.json [--beside TREE]
    python -m benchmarks.h200.random_rows --write      puts the table into kernels.md

`--beside` measures the code of another tree in the same run. Graphs of 20 calls over four sets of logits, the median of
7 replays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.back.kernels.greedy import op as greedy_op
from headrace.back.kernels.sample import op as sample_op
from headrace.back.kernels.triton.timing import each_us
from headrace.bench.report import markdown_table, versions

HERE = Path(__file__).resolve().parent
WIDTH, SETS, CALLS = 151_936, 4, 20
BEGIN, END = (
    "<!-- random rows: made by benchmarks.h200.random_rows -->",
    "<!-- end of random rows -->",
)
# temperature, top_k, top_p, min_p
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_k 20,000": (0.8, 20_000, 1.0, 0.0),
    "top_p 0.9": (0.8, 0, 0.9, 0.0),
    "top_k 20, top_p 0.95, min_p 0.01": (0.8, 20, 0.95, 0.01),
}


def logits_of(kind: str, rows: int) -> torch.Tensor:
    """float32 [rows, WIDTH]: `flat` as of dummy weights, `peaked` as of a model that knows what comes."""
    generator = torch.Generator("cuda").manual_seed(rows)
    found = torch.randn(rows, WIDTH, generator=generator, device="cuda")
    if kind == "flat":
        return found * 0.5
    found *= 2.5
    likely = torch.randint(WIDTH, (rows, 30), generator=generator, device="cuda")
    found.scatter_(1, likely, 8.0 + 6.0 * torch.rand(likely.shape, device="cuda"))
    return found.scatter_(1, likely[:, :1], 15.0)


def measured() -> list[dict[str, Any]]:
    """Every case; `mixed` gives each row another setting."""
    greedy = greedy_op.OP.choose(greedy_op.GreedyProblem(device="cuda")).bind()
    sample = sample_op.OP.choose(sample_op.SampleProblem(device="cuda")).bind()
    found = []
    for rows in (1, 32, 256):
        for kind in ("flat", "peaked"):
            sets = [logits_of(kind, rows) for _ in range(SETS)]
            argmax = [tuple(logits.max(1))[::-1] for logits in sets]
            us = each_us([lambda x=x: greedy(x) for x in sets] * (CALLS // SETS))
            found.append({"rows": rows, "logits": kind, "sampling": "argmax", "us": us})
            names = [*SETTINGS, "mixed"] if rows > 1 else SETTINGS
            for name in names:
                several = list(SETTINGS.values()) if name == "mixed" else [SETTINGS[name]]
                numbers = [np.array([several[i % len(several)][n] for i in range(rows)])
                           for n in range(4)]  # fmt: skip
                table = torch.from_numpy(
                    sample_op.numbers(
                        heat=numbers[0], seed=np.arange(rows, dtype=np.uint64), top_k=numbers[1],
                        top_p=numbers[2], min_p=numbers[3],
                    )
                ).cuda()  # fmt: skip
                row = torch.arange(rows, dtype=torch.int32, device="cuda")
                calls = [
                    lambda x=x, best=best, table=table, row=row: sample(x, best, table, row, row)
                    for x, best in zip(sets, argmax, strict=True)
                ]
                us = each_us(calls * (CALLS // SETS))
                found.append({"rows": rows, "logits": kind, "sampling": name, "us": us})
                print(json.dumps(found[-1]), flush=True)
    return found


def beside(tree: str) -> list[dict[str, Any]]:
    """The same of another tree's code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "random-rows.json"
        path = os.pathsep.join((tree, os.environ.get("PYTHONPATH", "")))
        subprocess.run(
            [sys.executable, __file__, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tree,
            check=True,
        )
        return list(json.loads(out.read_text())["rows_measured"])


def table(result: dict[str, Any]) -> str:
    """What goes into kernels.md."""
    before = {(r["rows"], r["logits"], r["sampling"]): r["us"] for r in result.get("before", ())}
    rows = []
    for one in result["rows_measured"]:
        key = (one["rows"], one["logits"], one["sampling"])
        rows.append((*key, f"{one['us']:.1f}", f"{before[key]:.1f}" if key in before else ""))
    return markdown_table(("rows", "logits", "sampling", "us", "before, us"), rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--beside")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        page = HERE / "kernels.md"
        head, _, rest = page.read_text().partition(BEGIN)
        result = json.loads((HERE / "results" / "random-rows.json").read_text())
        page.write_text(f"{head}{BEGIN}\n\n{table(result)}\n\n{END}{rest.partition(END)[2]}")
        return
    result: dict[str, Any] = {"versions": versions(), "rows_measured": measured()}
    if given.beside:
        result["before"] = beside(given.beside)
    print(table(result))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
