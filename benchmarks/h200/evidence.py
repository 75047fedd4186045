"""What the tables of speed rest on, shown once on an H200, in one run of less than four minutes:

- no hazards between the warps of Hopper's attention kernels (compute-sanitizer's racecheck);
- 1,000 runs of attention over KV splits give the same bits;
- sampling of 1,024 rows of 200,000 logits gives the tokens of the reference, which sorts;
- top-k in sampling beside torch.sort: the same tokens, and microseconds;
- no access beyond what kernels of quantized weights and caches were given (compute-sanitizer's memcheck, on the odd
  shapes of memory_checks.py; not among the parts of a plain run).

    python -m benchmarks.h200.evidence [--only racecheck,splits,sampling,top_k,memcheck] [--out FOLDER]

Writes evidence.json and evidence.md into FOLDER, else $OUT, else benchmarks/h200/results. Exits 1 if
something is not as said; a missing compute-sanitizer is a row of its own and no success.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.h200.memory_checks import FAMILIES
from headrace.back.kernels.attention import triton_attention, triton_fixed
from headrace.back.kernels.attention.op import (
    AttentionFunction,
    AttentionProblem,
    SamplePlan,
    sample_plan,
)
from headrace.back.kernels.kv_write.quantized import random_quantized_cache
from headrace.back.kernels.op import sample_generator
from headrace.back.kernels.sample import op as draw_op
from headrace.back.kernels.triton.timing import each_us
from headrace.bench.report import markdown_table, versions

HERE = Path(__file__).resolve().parent
RUNS = 1000
SANITIZER_S = 30.0
MEMCHECK_S, MEMCHECKS = 110.0, 11
WIDTH, ROWS = 200_000, 1024
Row = dict[str, Any]


def problem(quantized: str | None = None, *, device: str = "cuda") -> AttentionProblem:
    """The attention of Qwen3 8B."""
    return AttentionProblem(
        device=device, dtype=torch.bfloat16, heads=32, kv_heads=8, head_dim=128, block_tokens=16,
        scale=128**-0.5, quantized=quantized,
    )  # fmt: skip


def inputs(
    case: AttentionProblem, rows: list[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor, SamplePlan]:
    """Queries, cache and plan of rows (query tokens, KV length)."""
    plan, blocks = sample_plan(
        rows, block_tokens=case.block_tokens, window=None, device=case.device
    )
    generator = sample_generator(case.device)
    shape = (blocks, case.kv_heads, case.block_tokens, case.head_dim)
    if case.quantized:
        kv = random_quantized_cache(shape, generator=generator, device=case.device)
    else:
        kv = torch.randn(blocks, 2, *shape[1:], generator=generator, device=case.device)
        kv = kv.to(case.dtype)
    tokens = sum(queries for queries, _ in rows)
    q = torch.randn(tokens, case.heads, case.head_dim, generator=generator, device=case.device)
    return q.to(case.dtype), kv, plan


SPLITS: dict[
    str, tuple[Callable[[AttentionProblem], AttentionFunction], str | None, list[tuple[int, int]]]
]
SPLITS = {
    "decode kernel, 3 rows": (triton_attention.bind, None, [(1, 30_000), (1, 9000), (1, 70)]),
    "few queries, 12 rows": (triton_attention.bind, None, [(4, 900 * i + 5) for i in range(12)]),
    "Hopper decode, 40 rows": (triton_attention.bind, None, [(1, 400 * i + 5) for i in range(40)]),
    "Hopper decode, fp8, 40 rows": (
        triton_attention.bind, "fp8", [(1, 400 * i + 5) for i in range(40)],
    ),
    "fixed order, 3 rows": (triton_fixed.bind, None, [(1, 30_000), (1, 9000), (1, 70)]),
}  # fmt: skip


def differing(attend: Callable[[], torch.Tensor], runs: int) -> int:
    """How many of the runs differ from the first in a bit."""
    first = attend().clone().view(torch.int16)
    count = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(runs):
        count += (attend().view(torch.int16) != first).any()
    return int(count)


def splits(runs: int = RUNS) -> Iterator[Row]:
    """Attention over KV splits, `runs` times."""
    for name, (bind, quantized, rows) in SPLITS.items():
        case = problem(quantized)
        q, kv, plan = inputs(case, rows)
        plan = replace(plan, max_query_len=max(queries for queries, _ in rows))
        attend = bind(case)
        count = differing(lambda attend=attend, q=q, kv=kv, plan=plan: attend(q, kv, plan), runs)
        yield {"what": name, "runs": runs, "differing": count, "passed": count == 0}


HOPPER: dict[str, tuple[str | None, list[tuple[int, int]]]] = {
    "decode": (None, [(1, 40 * i + 1) for i in range(9)]),
    "decode_int8": ("int8", [(1, 40 * i + 1) for i in range(9)]),
    "decode_fp8": ("fp8", [(1, 40 * i + 1) for i in range(9)]),
    "prefill": (None, [(150, 400)]),
    "prefill_fp8": ("fp8", [(150, 400)]),
    # Lengths that fill the last tile of positions: nothing there is to be cleared.
    "prefill_full_tiles": (None, [(150, 384)]),
    "prefill_fp8_full_tiles": ("fp8", [(150, 384)]),
}


def hopper_once(name: str) -> None:
    """One launch of a Hopper kernel, for the sanitizer to look at."""
    quantized, rows = HOPPER[name]
    case = problem(quantized)
    q, kv, plan = inputs(case, rows)
    out = triton_attention.bind(case)(q, kv, plan)
    torch.cuda.synchronize()
    assert out.isfinite().all()


def racecheck() -> Iterator[Row]:
    """Racecheck of each Hopper kernel, one launch each; the kernels are compiled before."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        yield {"what": "racecheck", "summary": "compute-sanitizer is not here", "passed": False}
        return
    command = [tool, "--tool", "racecheck", "--kernel-regex", "kns=hopper_kernel"]
    command += ["--kernel-regex", "kns=prefill_quantized_kernel"]
    for name in HOPPER:
        hopper_once(name)
        inner = [sys.executable, "-m", "benchmarks.h200.evidence", "--once", name]
        try:
            done = subprocess.run(
                [*command, *inner], capture_output=True, text=True, timeout=SANITIZER_S
            )
        except subprocess.TimeoutExpired:
            yield {"what": name, "summary": f"no end after {SANITIZER_S:.0f} s", "passed": False}
            continue
        lines = re.findall(r"RACECHECK SUMMARY: (.*)", done.stdout + done.stderr)
        summary = lines[-1] if lines else (done.stdout + done.stderr)[-200:]
        passed = done.returncode == 0 and summary.startswith("0 hazards")
        for place in places(done.stdout):
            print(f"{name}: {place}", flush=True)
        yield {"what": name, "summary": summary, "passed": passed}


def memcheck() -> Iterator[Row]:
    """Memcheck of each family of quantized kernels, side by side; every tensor is an allocation of its own. Kernels
    are compiled before."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        yield {
            "what": "memcheck",
            "calls": 0,
            "summary": "compute-sanitizer is not here",
            "passed": False,
        }
        return
    checked = [tool, "--tool", "memcheck", "--error-exitcode", "9"]

    def run(family: str, *before: str) -> tuple[int, str]:
        inner = [sys.executable, "-m", "benchmarks.h200.memory_checks", family]
        whole = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                [*before, *inner], capture_output=True, text=True, timeout=MEMCHECK_S, env=whole
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end after {MEMCHECK_S:.0f} s"
        return done.returncode, done.stdout + done.stderr

    def both(family: str) -> tuple[int, str]:
        plain = run(family)
        return plain if plain[0] else run(family, *checked)

    with ThreadPoolExecutor(MEMCHECKS) as pool:
        for family, (code, report) in zip(FAMILIES, pool.map(both, FAMILIES), strict=True):
            calls = re.findall(r"^(\d+) calls$", report, re.MULTILINE)
            lines = re.findall(r"ERROR SUMMARY: (.*)", report)
            if code:
                print(family, report[-3000:], flush=True)
            yield {
                "what": family,
                "calls": int(calls[-1]) if calls else 0,
                "summary": lines[-1] if lines else report[-200:],
                "passed": code == 0 and bool(lines) and lines[-1].startswith("0 errors"),
            }


def places(report: str) -> list[str]:
    """Where racecheck saw the first hazards: each with the accesses that it names, the function and
    the line of each."""
    marks = (
        "Race reported",
        "hazard detected",
        "Write Thread",
        "Read Thread",
        "Write access",
        "Read access",
    )
    lines = [line.lstrip("= ") for line in report.splitlines()]
    return [line for line in lines if any(mark in line for mark in marks)][:24]


# temperature, top_k, top_p, min_p
SETTINGS = {
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_p 0.9": (0.8, 0, 0.9, 0.0),
    "top_k 20, top_p 0.95, min_p 0.01": (0.8, 20, 0.95, 0.01),
}


def arguments(
    logits: torch.Tensor, setting: tuple[float, int, float, float]
) -> tuple[
    torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor
]:
    """What the sampling op takes, every row with the same setting and a seed of its own."""
    count, device = len(logits), logits.device
    heat, top_k, top_p, min_p = (np.full(count, number) for number in setting)
    rows = draw_op.numbers(
        heat=heat, seed=np.arange(count, dtype=np.uint64), top_k=top_k, top_p=top_p, min_p=min_p
    )
    value, token = logits.max(dim=1)
    row = torch.arange(count, dtype=torch.int32, device=device)
    return logits, (token, value), torch.from_numpy(rows).to(device), row, row


def random_logits(rows: int, width: int, device: str = "cuda") -> torch.Tensor:
    """float32 [rows, width], as of a model: a few likely tokens above the others."""
    generator = sample_generator(device)
    logits = torch.randn(rows, width, generator=generator, device=device) * 2.5
    likely = torch.randint(width, (rows, 30), generator=generator, device=device)
    return logits.scatter_(1, likely, 9.0)


def same_tokens(logits: torch.Tensor, setting: tuple[float, int, float, float], chunk: int) -> int:
    """Rows whose token is the reference's, which sorts in float64, `chunk` rows at a time."""
    device = logits.device.type
    case = draw_op.SampleProblem(device=device)
    tokens, _ = draw_op.OP.choose(case).bind()(*arguments(logits, setting))
    reference = draw_op.OP.reference.bind(case)
    whole, argmax, rows, row, position = arguments(logits, setting)
    count = 0
    for first in range(0, len(logits), chunk):
        part = slice(first, first + chunk)
        expected, _ = reference(
            whole[part], (argmax[0][part], argmax[1][part]), rows, row[part], position[part]
        )
        count += int((tokens[part] == expected).sum())
    return count


def sampling(rows: int = ROWS, width: int = WIDTH, device: str = "cuda") -> Iterator[Row]:
    """Every setting over one large step."""
    logits = random_logits(rows, width, device)
    for name, setting in SETTINGS.items():
        count = same_tokens(logits, setting, 64)
        yield {
            "what": f"{rows} x {width}, {name}", "same tokens": count, "passed": count == rows,
        }  # fmt: skip


def eager_us(call: Callable[[], object], calls: int = 5) -> float:
    """Median microseconds of a call outside a graph, which sorting may not enter."""
    times = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return sorted(times)[calls // 2]


def top_k() -> Iterator[Row]:
    """Sampling with top_k 50 beside torch.sort of the same logits alone."""
    choice = draw_op.OP.choose(draw_op.SampleProblem(device="cuda"))
    for rows in (1, 32, 128, 1024):
        for width in (32_000, 128_000, 256_000):
            logits = random_logits(rows, width)
            step = arguments(logits, SETTINGS["top_k 50"])
            ours = each_us([partial(choice.bind(), *step)] * 4, replays=3)
            theirs = eager_us(partial(torch.sort, logits, dim=1, descending=True))
            same = same_tokens(logits[:64], SETTINGS["top_k 50"], 64)
            yield {
                "what": f"{rows} x {width}", "kernel": choice.kernel.name, "us": round(ours, 1),
                "torch.sort us": round(theirs, 1), "passed": same == min(rows, 64),
            }  # fmt: skip


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "splits": splits, "sampling": sampling, "top_k": top_k, "racecheck": racecheck,
    "memcheck": memcheck,
}  # fmt: skip
USUAL = ("splits", "sampling", "top_k", "racecheck")


def written(results: dict[str, list[Row]], folder: Path) -> None:
    """evidence.json and evidence.md."""
    report = {"versions": versions(), "results": results}
    (folder / "evidence.json").write_text(json.dumps(report, indent=1) + "\n")
    tables = []
    for name, rows in results.items():
        heads = list(rows[0])
        cells = [[str(row[head]) for head in heads] for row in rows]
        tables.append(f"## {name}\n\n{markdown_table(heads, cells)}\n")
    (folder / "evidence.md").write_text("\n".join(tables))


def main() -> int:
    """Runs what is asked for and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(USUAL))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"))
    parser.add_argument("--once", choices=HOPPER, help="one launch, for the sanitizer")
    args = parser.parse_args()
    if args.once:
        hopper_once(args.once)
        return 0
    results: dict[str, list[Row]] = {}
    for name in args.only.split(","):
        began = time.perf_counter()
        results[name] = []
        for row in PARTS[name]():
            results[name].append(row)
            print(name, row, f"{time.perf_counter() - began:.0f} s", flush=True)
    written(results, args.out)
    return 0 if all(row["passed"] for rows in results.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
