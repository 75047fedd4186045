"""Experts and latent attention alone on one H200: each step's kernels against the memory's rate and dense GEMMs.

    python -m benchmarks.h200.mixtures --parts experts,grouped,latents,prompts --out mixtures.json

experts: the whole op (dispatch, both grouped GEMMs, combination) at uniform routing, by the kernel that is chosen for
the step and by the one of fixed order. grouped: the two grouped GEMMs alone beside torch's dense GEMM of as many
operations. latents: decode attention over latents, and the same latents' bytes at the memory's rate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.shapes import BYTES_PER_S, FLOPS
from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.expanded_attention import triton_hopper as triton_expanded
from headrace.back.kernels.expanded_attention.op import ExpandedAttentionProblem
from headrace.back.kernels.experts import triton_experts, triton_hopper
from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.kernels.experts.triton_dispatch import combined, dispatched
from headrace.back.kernels.head_linear import triton_head_linear
from headrace.back.kernels.head_linear.op import HeadLinearProblem
from headrace.back.kernels.latent_attention import triton_hopper as triton_hopper_latent
from headrace.back.kernels.latent_attention import triton_latent
from headrace.back.kernels.latent_attention.op import LatentAttentionProblem
from headrace.back.kernels.triton.timing import each_us

NEW: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
SHAPES = {
    "30B-A3B": ExpertsProblem(**NEW, experts=128, slots=8, width=2048, inner=768),
    "V2-Lite": ExpertsProblem(**NEW, experts=66, slots=8, width=2048, inner=1408),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
LATENTS = ((16, 1, 81920), (16, 16, 8192), (16, 32, 8192), (16, 64, 8192), (128, 1, 81920),
           (128, 16, 8192), (128, 64, 8192))  # fmt: skip
"""(heads, rows, positions)."""
PROMPTS = ((1, 16, 16), (1, 16, 1024), (1, 16, 8192), (1, 64, 64), (1, 64, 1024), (1, 64, 8192), (1, 128, 128),
           (1, 256, 256), (1, 256, 8192), (1, 512, 512), (1, 1024, 1024), (1, 4096, 4096), (1, 8192, 8192),
           (16, 8, 512), (16, 32, 512), (16, 1024, 1024))  # fmt: skip
"""(rows, queries of each, positions)."""


def weights_of(problem: ExpertsProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Up and down, random."""
    up = torch.randn(problem.experts, 2 * problem.inner, problem.width, **NEW)
    down = torch.randn(problem.experts, problem.width, problem.inner, **NEW)
    return up.mul_(problem.width**-0.5), down.mul_(problem.inner**-0.5)


def inputs_of(problem: ExpertsProblem, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """x, experts and weights, uniform."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    order = torch.rand(tokens, problem.experts, device="cuda", generator=generator)
    expert = order.topk(problem.slots).indices.int().contiguous()
    weight = torch.rand(tokens, problem.slots, device="cuda", generator=generator)
    return torch.randn(tokens, problem.width, **NEW), expert, weight


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norms."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def experts() -> list[dict[str, Any]]:
    """Microseconds of the whole op, and its floor: bytes of the experts that were chosen, or operations."""
    rows = []
    for name, problem in SHAPES.items():
        layers = [weights_of(problem) for _ in range(2)]
        for tokens in TOKENS:
            inputs = [inputs_of(problem, tokens, seed) for seed in range(4)]
            distinct = sum(len(one[1].unique()) for one in inputs) / len(inputs)
            expert_weights = 3 * problem.width * problem.inner
            floor = max(
                distinct * expert_weights * 2 / BYTES_PER_S,
                tokens * problem.slots * expert_weights * 2 / FLOPS,
            )
            plan = triton_hopper.plan_for(problem, tokens)
            row: dict[str, Any] = {
                "shape": name,
                "tokens": tokens,
                "distinct": distinct,
                "floor_us": round(floor * 1e6, 1),
                "plan": f"{plan.regime} {plan.m}",
            }
            binds: dict[str, Callable[..., Any]] = {"fixed": triton_experts.bind}
            for other in triton_hopper.PLANS:
                if other == plan or _near(problem, tokens, other):
                    label = f"{other.regime} {other.m}"
                    binds[label] = partial(triton_hopper.bind, always=other)
            expected = None
            for label, bind in binds.items():
                try:
                    runs = [bind(problem, *weights) for weights in layers]
                    found = runs[0](*inputs[0])
                    expected = found if expected is None else expected
                    row[f"{label} error"] = round(error(found, expected), 5)
                    calls = [partial(runs[i % 2], *inputs[i % 4]) for i in range(8)]
                    row[label] = round(each_us(calls, replays=5), 1)
                except Exception as failure:
                    row[label] = f"{type(failure).__name__}: {failure}"[:200]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _near(problem: ExpertsProblem, tokens: int, plan: triton_hopper.ExpertsPlan) -> bool:
    """Whether a plan may be the better one."""
    if plan.regime == "few":
        return tokens <= 8
    mean = tokens * problem.slots / problem.experts
    return mean / 4 <= plan.m <= 16 + 8 * mean


def grouped() -> list[dict[str, Any]]:
    """TFLOP/s of the grouped GEMMs alone and of the dense GEMM of as many operations."""
    rows = []
    problem = SHAPES["30B-A3B"]
    up, down = weights_of(problem)
    for tokens in (4096, 16384):
        x, expert, weight = inputs_of(problem, tokens, 1)
        pairs = tokens * problem.slots
        found = dispatched(x, expert, experts=problem.experts, m=triton_hopper.WIDE_ROWS)
        inner = x.new_empty(len(found.rows_NE), problem.inner)
        row: dict[str, Any] = {"tokens": tokens, "padded": len(found.rows_NE) / pairs}
        plan = triton_hopper.PLANS[-1]
        gemms = {
            "up": (up, found.rows_NE, inner, True),
            "down": (down, inner, torch.empty_like(found.rows_NE), False),
        }
        for name, (matrix, rows_in, rows_out, is_gated) in gemms.items():
            run = triton_hopper.Grouped(
                matrix.flatten(0, 1), results=rows_out.shape[1], is_gated=is_gated
            )
            call = partial(run.run, plan, rows_in, found.tiles, rows_out)
            us = each_us([call] * 4, replays=5)
            outputs, inputs = matrix.shape[1:]
            dense_x = torch.randn(pairs, inputs, **NEW)
            dense_w = torch.randn(outputs, inputs, **NEW)
            dense_us = each_us([partial(torch.matmul, dense_x, dense_w.t())] * 4, replays=5)
            flops = 2 * pairs * outputs * inputs
            row |= {
                f"{name} TFLOP/s": round(flops / us / 1e6),
                f"{name} dense": round(flops / dense_us / 1e6),
                f"{name} of dense": round(dense_us / us, 3),
            }
        for name, call in {
            "dispatch us": partial(
                dispatched, x, expert, experts=problem.experts, m=triton_hopper.WIDE_ROWS
            ),
            "combine us": partial(combined, found.rows_NE, weight, found.places_P, x),
        }.items():
            row[name] = round(each_us([call] * 4, replays=5), 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def latents() -> list[dict[str, Any]]:
    """Decode over latents: share of the memory's rate, and TFLOP/s."""
    rows = []
    for heads, count, length in LATENTS:
        problem = LatentAttentionProblem(
            **NEW, heads=heads, rank=512, rotary=64, block_tokens=16, scale=192**-0.5
        )
        plan, blocks = sample_plan(
            [(1, length)] * count, block_tokens=16, window=None, device="cuda"
        )
        caches = [torch.randn(blocks, 16, 576, **NEW) for _ in range(2 if count > 8 else 4)]
        q = torch.randn(count, heads, 576, **NEW)
        num_bytes, flops = count * length * 576 * 2, 2 * count * length * heads * (576 + 512)
        us, fixed_us = (
            each_us([partial(bind(problem), q, kv, plan) for kv in caches], replays=5)
            for bind in (triton_hopper_latent.bind, triton_latent.bind)
        )
        row = {
            "heads": heads,
            "rows": count,
            "positions": length,
            "us": round(us, 1),
            "fixed us": round(fixed_us, 1),
            "of_memory": round(num_bytes / us * 1e6 / BYTES_PER_S, 3),
            "TFLOP/s": round(flops / us / 1e6),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def prompts() -> list[dict[str, Any]]:
    """Prompts of 16 heads absorbed and expanded, each with the products before and behind: microseconds."""
    rows, heads, scale = [], 16, 192**-0.5
    facts = {**NEW, "heads": heads}
    latent = LatentAttentionProblem(**facts, rank=512, rotary=64, block_tokens=16, scale=scale)
    expanded = ExpandedAttentionProblem(**facts, own=128, values=128, rotary=64, scale=scale)
    key, value = (torch.randn(heads, *size, **NEW) * 0.05 for size in ((512, 128), (128, 512)))
    absorb, expand = (
        triton_head_linear.bind(HeadLinearProblem(**facts, inputs=i, outputs=o), weight)
        for i, o, weight in ((128, 512, key), (512, 128, value))
    )
    attend, attend_expanded = triton_latent.bind(latent), triton_expanded.bind(expanded)
    for count, queries, length in PROMPTS:
        plan, blocks = sample_plan(
            [(queries, length)] * count, block_tokens=16, window=None, device="cuda"
        )
        kv = torch.randn(blocks, 16, 576, **NEW)
        at = torch.randperm(blocks * 16, device="cuda")[: count * length]
        begins = torch.arange(count, device="cuda", dtype=torch.int32) * length
        q = torch.randn(count * queries, heads, 576, **NEW)
        y = torch.empty(count * queries, heads, 128, **NEW)

        def absorbed(q=q, kv=kv, plan=plan, y=y) -> None:
            absorb(q[..., :128], q[..., :512])
            expand(attend(q, kv, plan), y)

        def in_full(q=q, kv=kv, plan=plan, at=at, begins=begins) -> None:
            latent_SW = kv.flatten(0, 1).index_select(0, at)
            own, rotated = latent_SW[:, :512], latent_SW[:, 512:]
            keys, values = torch.matmul(own, key), torch.matmul(own, value.transpose(1, 2))
            attend_expanded(q[..., :128], q[..., 512:], keys, rotated, values, begins, plan)

        seen = count * queries * (2 * length - queries + 1) / 2
        row: dict[str, Any] = {"rows": count, "queries": queries, "positions": length}
        row["absorbed"] = round(each_us([absorbed] * 2, replays=3), 1)
        row["expanded"] = us = round(each_us([in_full] * 2, replays=3), 1)
        row["expanded TFLOP/s"] = round(2 * seen * heads * 320 / us / 1e6)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


PARTS = {"experts": experts, "grouped": grouped, "latents": latents, "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="experts,grouped,latents,prompts")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {part: PARTS[part]() for part in given.parts.split(",")}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
