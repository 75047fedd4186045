"""The choice of positions by an indexer alone, as a replayed graph: all of it, its scores by tiles, and its select
beside torch.topk over the same scores (KRN-04).
`python -m benchmarks.h200.chosen [--rows 1,8,64,256] [--lengths 8192,32768,131072] [--out FILE]`.

DeepSeek-V3.2's indexer: 64 heads of 128, the best 2,048 positions, bfloat16. Rows share their blocks of keys, so that
the second-level cache helps the scores more than it would; the select reads scores of its own for each row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton

from headrace.back.kernels.attention.op import SamplePlan, sample_plan
from headrace.back.kernels.index_select import triton_index_select as kernel
from headrace.back.kernels.index_select import triton_select
from headrace.back.kernels.index_select.op import IndexSelectProblem
from headrace.back.kernels.triton.wrap import launch

HEADS, DIM, TOP_K, BLOCK = 64, 128, 2048, 64


def microseconds(call: Callable[[], object]) -> float:
    """Median of the call as a graph."""
    return float(triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median") * 1000)


def plan_of(rows: int, length: int) -> tuple[SamplePlan, int]:
    """A decode of each row at this length; all rows have the blocks of the first."""
    plan, blocks = sample_plan([(1, length)] * rows, block_tokens=BLOCK, window=None, device="cpu")
    count = length // BLOCK
    plan.block_table_RB[:] = torch.arange(1, count + 1, dtype=torch.int32)
    on_device = {
        name: getattr(plan, name).cuda()
        for name in ("query_start_R1", "kv_len_R", "block_table_RB", "slot_T")
    }
    return replace(plan, **on_device), min(blocks, count + 1)


def select_alone(plan: SamplePlan, bits: torch.Tensor, chosen: torch.Tensor) -> None:
    """The select, of scores that are there: int32 in their order."""
    rows, length = bits.shape
    triton_select.select_kernel[(rows, 1)](
        bits, chosen, plan.query_start_R1, plan.kv_len_R, rows, 0, length, LISTS=1, TOP_K=TOP_K,
        GROUP=1, BEGUN=False, LOCAL=0, N=triton_select.READ, num_warps=8, **launch(bits.device),
    )  # fmt: skip


TILES = tuple(
    kernel.ScoreTiles(places=places, heads=heads, num_warps=warps)
    for places, heads, warps in (
        (64, 16, 4),
        (64, 64, 4),
        (128, 32, 4),
        (128, 64, 4),
        (128, 64, 8),
        (256, 64, 8),
    )
)


class ScoresAlone(kernel.EntrySelect):
    """Chooses nothing."""

    def select_long(self, *given: object) -> None:
        """Nothing."""


def scored(
    plan: SamplePlan, problem: IndexSelectProblem, tiles: kernel.ScoreTiles, *inputs: torch.Tensor
) -> object:
    """The scores alone, by these tiles."""
    facts = {"heads": HEADS, "dim": DIM, "top_k": TOP_K, "group": 1, "block_tokens": BLOCK}
    select = ScoresAlone(**facts, tiles=tiles, part=1)
    chosen = torch.empty(len(inputs[0]), TOP_K, dtype=torch.int32, device="cuda")
    return partial(select, *inputs, plan, chosen)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    print(torch.cuda.get_device_name())
    problem = IndexSelectProblem(
        device="cuda", dtype=torch.bfloat16, heads=HEADS, dim=DIM, top_k=TOP_K, block_tokens=BLOCK
    )
    select = kernel.bind(problem)
    entries = kernel.EntrySelect(
        heads=HEADS, dim=DIM, top_k=TOP_K, group=1, block_tokens=BLOCK, part=kernel.PART
    )
    found: list[dict[str, object]] = []
    for rows, length in product(
        map(int, asked.rows.split(",")), map(int, asked.lengths.split(","))
    ):
        plan, blocks = plan_of(rows, length)
        q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(rows, HEADS, device="cuda", dtype=torch.bfloat16)
        keys = torch.randn(blocks, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
        scores = torch.randn(rows, length, device="cuda")
        bits = scores.view(torch.int32)
        bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        chosen = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")

        best = scores.topk(TOP_K).values
        alone = partial(select_alone, plan, bits, chosen)
        by_candidates = partial(entries.select_long, bits, chosen, plan, 0)
        for one in (alone, by_candidates):
            chosen.zero_()
            one()
            values = scores.gather(1, chosen.long()).sort(descending=True).values
            assert torch.equal(values, best)
        row: dict[str, object] = {"rows": rows, "positions": length}
        row["op"] = microseconds(lambda q=q, w=weight, k=keys, p=plan: select(q, w, k, p))
        row["whole rows"] = microseconds(alone)
        row["candidates"] = microseconds(by_candidates)
        row["topk"] = microseconds(lambda scores=scores: scores.topk(TOP_K))
        for tiles in TILES:
            name = f"scores {tiles.places} x {tiles.heads}, {tiles.num_warps} warps"
            try:
                row[name] = microseconds(scored(plan, problem, tiles, q, weight, keys))
            except Exception as failure:
                row[name] = f"{type(failure).__name__}: {failure}"[:200]
        found.append(row)
        print(json.dumps(row), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
