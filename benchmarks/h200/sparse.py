"""Sparse latent attention and what stands before experts and latents, on one H200: microseconds of recorded launches.

    python -m benchmarks.h200.sparse --parts sparse,routes,downs --out sparse.json

sparse: attention over what an indexer chooses, by tiles, beside attention over all (KRN-03). routes: the choice of
experts (KRN-16). downs: the joined down-projection of latent attention beside two products (KRN-21).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.mixtures import NEW, error
from benchmarks.h200.shapes import BYTES_PER_S
from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.index_select import triton_index_select
from headrace.back.kernels.index_select.op import IndexSelectProblem
from headrace.back.kernels.latent_attention import triton_hopper
from headrace.back.kernels.latent_attention.op import LatentAttentionProblem
from headrace.back.kernels.linear import triton_linear
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.route import triton_route
from headrace.back.kernels.route.op import OP as ROUTE
from headrace.back.kernels.route.op import RouteProblem
from headrace.back.kernels.sparse_latent_attention import triton_sparse_latent
from headrace.back.kernels.sparse_latent_attention.op import SparseLatentProblem
from headrace.back.kernels.sparse_latent_attention.triton_sparse_latent import SparseTiles
from headrace.back.kernels.triton.timing import each_us

SPARSE_LENGTH, TOP_K = 131072, 2048
FEW_TILES = [
    SparseTiles(heads=heads, positions=positions, num_warps=warps, part=part)
    for heads, positions, warps in ((16, 32, 4), (16, 64, 4), (64, 32, 8))
    for part in (128, 256, 512, 1024)
]
MANY_TILES = [
    SparseTiles(heads=heads, positions=positions, num_warps=warps, num_stages=stages)
    for heads, positions, warps, stages in (
        (16, 32, 4, 2), (32, 32, 4, 3), (64, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 1), (64, 64, 8, 2),
        (128, 32, 8, 1),
    )
]  # fmt: skip


def sparse() -> list[dict[str, Any]]:
    """Decode of 128 heads at 128K over all, over 2,048 chosen, and with the indexer that chooses; and prompts over what
    is chosen: microseconds, TFLOP/s."""
    rows = []
    facts = {**NEW, "heads": 128, "rank": 512, "rotary": 64, "block_tokens": 64, "scale": 192**-0.5}
    problem = SparseLatentProblem(**facts, top_k=TOP_K)
    chooses = IndexSelectProblem(**NEW, heads=64, dim=128, top_k=TOP_K, block_tokens=64)
    for count, queries, length in ((1, 1, SPARSE_LENGTH), (8, 1, SPARSE_LENGTH), (1, 2048, 16384)):
        plan, blocks = sample_plan(
            [(queries, length)] * count, block_tokens=64, window=None, device="cuda"
        )
        kv, q = torch.randn(blocks, 64, 576, **NEW), torch.randn(count * queries, 128, 576, **NEW)
        chosen = torch.rand(count * queries, length, device="cuda")
        if queries > 1:
            seen = torch.arange(length - queries, length, device="cuda")[:, None]
            chosen = chosen.masked_fill(torch.arange(length, device="cuda") > seen, -1.0)
        chosen = chosen.topk(TOP_K).indices.sort().values.int().contiguous()
        row: dict[str, Any] = {"rows": count, "queries": queries, "positions": length}
        flops = 2 * count * queries * TOP_K * 128 * (576 + 512)
        expected = None
        for tiles in FEW_TILES if queries == 1 else MANY_TILES:
            name = "{heads} x {positions}, {num_warps} warps, {num_stages} stages, {part}".format(
                **asdict(tiles)
            )
            try:
                attend = triton_sparse_latent.bind(problem, None, tiles)
                found = attend(q, kv, plan, chosen)
                expected = found if expected is None else expected
                assert error(found, expected) < 0.02, error(found, expected)
                us = each_us([partial(attend, q, kv, plan, chosen)] * 4, replays=5)
                row[name] = f"{us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s"
            except Exception as failure:
                row[name] = f"{type(failure).__name__}: {failure}"[:150]
        attend = triton_sparse_latent.bind_by_steps(problem)
        row["chosen us"] = us = round(
            each_us([partial(attend, q, kv, plan, chosen)] * 4, replays=5), 1
        )
        row["chosen TFLOP/s"] = round(flops / us / 1e6)
        if queries == 1:
            dense = triton_hopper.bind(LatentAttentionProblem(**facts))
            select = triton_index_select.bind(chooses)
            index_q, weight = torch.randn(count, 64, 128, **NEW), torch.randn(count, 64, **NEW)
            keys = torch.randn(blocks, 64, 128, **NEW)

            def both(
                q=q, kv=kv, plan=plan, iq=index_q, w=weight, keys=keys, select=select, attend=attend
            ) -> None:
                attend(q, kv, plan, select(iq, w, keys, plan))

            row["dense us"] = dense_us = round(
                each_us([partial(dense, q, kv, plan)] * 4, replays=5), 1
            )
            row["with indexer us"] = both_us = round(each_us([both] * 4, replays=5), 1)
            row["times alone"], row["times with indexer"] = (
                round(dense_us / us, 1),
                round(dense_us / both_us, 1),
            )
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


ROUTES = {
    "R1: 256 of 8 groups": (256, 8, 8, 4),
    "K2.5: 384": (384, 8, 1, 1),
    "Nemotron: 512": (512, 22, 1, 1),
}
"""Experts, chosen, groups, groups kept."""


def routes() -> list[dict[str, Any]]:
    """The choice of experts (KRN-16), beside the same in PyTorch's operations: microseconds."""
    rows = []
    for name, (count, chosen, groups, kept) in ROUTES.items():
        problem = RouteProblem(
            device="cuda", experts=count, top_k=chosen, score="sigmoid", renormalize=True, scale=2.5, groups=groups,
            kept_groups=kept, group_score="top2", bias=True,
        )  # fmt: skip
        bias = torch.randn(count, device="cuda") * 0.1
        route, plain = triton_route.bind(problem, bias), ROUTE.reference.bind(problem, bias)
        for tokens in (1, 16, 64, 1024, 16384):
            logits = torch.randn(tokens, count, device="cuda")
            row = {"router": name, "tokens": tokens}
            row["us"] = round(each_us([partial(route, logits)] * 4, replays=5), 1)
            row["plain us"] = round(each_us([partial(plain, logits)] * 4, replays=3), 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _linear(weight_OI: torch.Tensor, x_TI: torch.Tensor) -> Callable[[], torch.Tensor]:
    outputs, inputs = weight_OI.shape
    problem = LinearProblem(**NEW, inputs=inputs, outputs=outputs)
    return partial(triton_linear.bind(problem, weight_OI, None), x_TI)


def downs() -> list[dict[str, Any]]:
    """q_a and kv_a of DeepSeek-V3 in one product (7168 to 2,112, KRN-21), beside two, and cuBLAS's: microseconds and
    the share of the memory's rate."""
    rows = []
    joined = [torch.randn(2112, 7168, **NEW) * 0.01 for _ in range(4)]
    for tokens in (1, 2, 4, 8, 16):
        x = torch.randn(tokens, 7168, **NEW)
        ours, two = [], []
        for weight in joined:
            whole = _linear(weight, x)
            first, second = (
                _linear(weight[:1536].contiguous(), x),
                _linear(weight[1536:].contiguous(), x),
            )
            ours.append(whole)
            two.append(lambda first=first, second=second: (first(), second()))
        library = [partial(torch.nn.functional.linear, x, weight) for weight in joined]
        row: dict[str, Any] = {"tokens": tokens}
        for name, calls in {"joined": ours, "two": two, "cublas": library}.items():
            row[f"{name} us"] = round(each_us(calls, replays=10), 2)
        row["of_memory"] = round(2112 * 7168 * 2 / row["joined us"] * 1e6 / BYTES_PER_S, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


PARTS = {"sparse": sparse, "routes": routes, "downs": downs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for part in given.parts.split(","):
        found[part] = PARTS[part]()
        if given.out:
            given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
