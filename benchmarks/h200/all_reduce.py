"""Sums over the GPUs of one machine: microseconds of our kernels and of NCCL, alone and with the residual and norm.

    python -m benchmarks.h200.all_reduce --ranks 2 --out benchmarks/h200/results/all-reduce-2.json
    python -m benchmarks.h200.all_reduce --write      makes all_reduce.md of the results that are there

One process a GPU; graphs of 20 calls, the median of 7 replays, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.h200.shapes import device_name
from headrace.back.kernels.all_reduce.measured import CALLS, measured_sums, peer_sums
from headrace.back.kernels.rms_norm import op as rms_norm
from headrace.back.kernels.triton.timing import graph_of, replay_us
from headrace.back.parallel.mesh import Axis
from headrace.bench.report import markdown_table, versions

WIDTH = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""8 KiB to 8 MiB in bfloat16; the engine itself gives messages above 4 MiB to the library."""


def rank_main(rank: int, ranks: int, folder: str) -> None:
    """One rank; rank 0 writes the rows."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    axis = Axis(size=ranks, rank=rank, group=dist.group.WORLD)
    sums = peer_sums(axis, device, most_bytes=8 << 20)
    problem = rms_norm.RMSNormProblem(device="cuda", dtype=torch.bfloat16, width=WIDTH, eps=1e-6)
    weight = torch.ones(WIDTH, device=device)
    add_norm = rms_norm.ADD_OP.choose(problem).bind(weight)
    rows = []
    for count in ROWS:
        x = torch.zeros(count, WIDTH, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)

        def library_norm(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            dist.all_reduce(x)
            add_norm(x, residual)

        ways: dict[str, Callable[[], object]] = {
            "NCCL": lambda x=x: dist.all_reduce(x), "NCCL, add, norm": library_norm,
        }  # fmt: skip
        for name, two in (("one shot", False), ("two shots", True)):
            ways[name] = lambda x=x, two=two: sums.all_reduce(x, two_shot=two)
            ways[f"{name}, add, norm"] = lambda x=x, residual=residual, two=two: sums.add_norm(
                x, residual, weight, eps=1e-6, two_shot=two
            )
        row: dict[str, Any] = {"KiB": count * WIDTH * 2 >> 10}
        for name, call in ways.items():
            graph = graph_of([call] * CALLS)
            dist.barrier()
            us = torch.tensor([replay_us(graph) / CALLS], device=device)
            dist.all_reduce(us, op=dist.ReduceOp.MAX)
            row[name] = us.item()
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    chosen = measured_sums(axis, device, torch.bfloat16)
    if rank == 0:
        print(chosen.chosen, "|", chosen.why, flush=True)
        result = {
            "versions": versions() | device_name(),
            "ranks": ranks,
            "chosen": chosen.chosen,
            "rows": rows,
        }
        Path(folder, "result").write_text(json.dumps(result, indent=1))
    dist.barrier()
    os._exit(0)


PAGE = """# Sums over GPUs

`python -m benchmarks.h200.all_reduce --ranks N --out RESULT`, then `--write`. Microseconds of a sum over the H200s of
one machine (NVLink, no multicast), bfloat16 rows of 4096, in graphs of 20 calls, the slowest rank's median: NCCL, and
our kernels (kernels/all_reduce) in one shot and in two; alone, and with the addition into the residual and the norm
behind it, which ours do in the same launch. The engine times both at start and takes what is quicker for each size.
That the sums have the same bits on every rank, in 1,000 replays of a graph too, and that a rank whose peer is gone gets
an error is held by tests/back/parallel/test_peers.py; that a model over four ranks has the tokens of one by
test_model_ranks.py. Whole models over four: [four.md](four.md).
"""
SECTION = """
## {ranks} ranks

{versions}. Chosen at start: {chosen}.

{table}
"""
RESULTS = Path(__file__).parent / "results"


def table(result: dict[str, Any]) -> str:
    """A row per size."""
    header = list(result["rows"][0])
    return markdown_table(header, [[row.get(h, "") for h in header] for row in result["rows"]])


def write() -> None:
    """The page of all results."""
    page = PAGE
    for found in sorted(RESULTS.glob("all-reduce-*.json")):
        result = json.loads(found.read_text())
        name = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        page += SECTION.format(**result | {"versions": name, "table": table(result)})
    Path(__file__).with_suffix(".md").write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        write()
        return
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            spawn.Process(target=rank_main, args=(rank, given.ranks, folder))
            for rank in range(given.ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(200)
            worker.kill()
        result = json.loads(Path(folder, "result").read_text())
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))
    print(table(result))


if __name__ == "__main__":
    main()
