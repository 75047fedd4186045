"""Tiles of the decode kernel that has a program a split, by number of rows, over caches as large as a model's; the one
that streams the cache: decode_streams.py.

    python -m benchmarks.lab.decode_tiles

Lengths are equal (positions) or drawn between two bounds: equal ones show how programs fill the device in whole waves,
drawn ones what a server sees. What was chosen: DECODE_TILES in kernels/attention/triton_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.h200.attention import problem
from benchmarks.h200.shapes import BYTES_PER_S
from headrace.back.kernels.attention import hopper_decode
from headrace.back.kernels.attention import triton_attention as kernels
from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.attention.triton_lists import Tiles
from headrace.back.kernels.kv_write.quantized import random_quantized_cache
from headrace.back.kernels.triton.timing import graph_of, replay_us

CASES: list[tuple[int, int, int]] = [
    (1, 238, 238), (1, 8192, 8192), (8, 238, 238), (8, 4096, 4096), (16, 238, 238), (16, 1088, 1088), (32, 238, 238),
    (48, 100, 1400), (64, 160, 160), (64, 500, 1700), (128, 238, 238), (128, 500, 1700), (224, 1088, 1088),
    (256, 238, 238), (256, 1088, 1088), (256, 500, 1700), (512, 500, 1900),
]  # fmt: skip
"""Rows, and the bounds of their lengths."""
TILES = [
    Tiles(m=16, n=n, num_warps=warps, num_stages=stages)
    for n, warps, stages in (
        *((128, 4, 3), (128, 4, 5), (64, 4, 5), (64, 2, 3), (64, 2, 5), (32, 2, 5)),
    )
]
LAYERS = 8
BLOCKS = 49_000
"""A layer's cache of an 8B model on an H200, 3.2 GB."""


def make_caches(*, quantized: bool = False) -> list[torch.Tensor]:
    """The caches of LAYERS layers, random."""
    case = problem("8B")
    if quantized:
        sizes = (BLOCKS, case.kv_heads, case.block_tokens, case.head_dim)
        generator = torch.Generator("cuda").manual_seed(0)
        return [
            random_quantized_cache(sizes, generator=generator, device="cuda") for _ in range(LAYERS)
        ]
    shape = (BLOCKS, 2, case.kv_heads, case.block_tokens, case.head_dim)
    return [torch.empty(shape, dtype=case.dtype, device="cuda").normal_() for _ in range(LAYERS)]


def main() -> None:
    case, caches = problem("8B"), make_caches()
    rng = np.random.default_rng(0)
    for rows, low, high in CASES:
        lengths = rng.integers(low, high + 1, rows).tolist()
        plan, _ = sample_plan(
            [(1, n) for n in lengths],
            block_tokens=case.block_tokens,
            window=None,
            device="cuda",
        )
        q = torch.randn(rows, case.heads, case.head_dim, dtype=case.dtype, device="cuda")

        def calls(q: torch.Tensor = q, plan: object = plan) -> list[Callable[[], object]]:
            attends = [kernels.bind(case) for _ in caches]
            return [
                lambda attend=attend, kv=kv: attend(q, kv, plan)
                for attend, kv in zip(attends, caches, strict=True)
            ]

        tried = []
        for tiles in TILES:
            for per_sm in (1, 2) if rows <= 16 else (2,):
                with ExitStack() as patches:
                    chosen = lambda case, rows=1, tiles=tiles: replace(tiles, m=max(tiles.m, 16))  # noqa: E731 - as long as a turn
                    patches.enter_context(patch.object(kernels, "decode_tiles", chosen))
                    patches.enter_context(patch.object(kernels, "PROGRAMS_PER_SM", per_sm))
                    patches.enter_context(patch.object(kernels, "FEW_ROWS", 0))
                    patches.enter_context(patch.object(hopper_decode, "LEAST_ROWS", 1 << 30))
                    us = replay_us(graph_of(calls()), replays=5) / LAYERS
                tried.append((round(us, 1), tiles.n, tiles.num_warps, tiles.num_stages, per_sm))
        floor = sum(lengths) * case.kv_heads * case.head_dim * 4 / BYTES_PER_S * 1e6
        print(f"{rows} x {low}..{high}: floor {floor:.1f} us;", *sorted(tried)[:5], flush=True)


if __name__ == "__main__":
    main()
