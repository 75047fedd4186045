"""The kernel that streams the cache beside the one with a program a split, decode rows, over caches as large as a
model's; variants of both sizes in turn within each round, so that a drift of clocks meets all alike.

    python -m benchmarks.lab.decode_streams [--models 8B,0.6B] [--variants] [--quantized fp8]

Microseconds; of the streaming kernel with positions and heads of a tile, KV heads of a tile, stages, and programs of a
multiprocessor.
What was chosen: STREAMS, QUANTIZED_STREAMS and LEAST_ROWS in kernels/attention/hopper_decode.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.h200.attention import problem
from benchmarks.h200.shapes import BYTES_PER_S
from benchmarks.lab.decode_tiles import CASES, LAYERS, make_caches
from headrace.back.kernels.attention import hopper_decode
from headrace.back.kernels.attention import triton_attention as kernels
from headrace.back.kernels.attention.hopper_decode import Streams
from headrace.back.kernels.attention.op import AttentionProblem, SamplePlan, sample_plan
from headrace.back.kernels.kv_write.quantized import SCALE_BYTES
from headrace.back.kernels.triton.timing import graph_of, replay_us

VARIANTS = [
    *(Streams(heads=heads) for heads in (1, 2, 4)),
    Streams(heads=2, stages=2),
]
OF_CODES = [
    *(Streams(heads=heads) for heads in (1, 2, 4)),
    Streams(heads=2, stages=5),
    *(Streams(heads=heads, per_sm=3, registers=168) for heads in (1, 2, 4)),
    *(Streams(heads=heads, rows=128, stages=2) for heads in (1, 2, 4, 8)),
]
ROUNDS = 3


def graph(
    case: AttentionProblem, caches: list[torch.Tensor], plan: SamplePlan, streams: Streams | None
) -> torch.cuda.CUDAGraph:
    """Layers of attention, one after the other; None: the kernel with a program a split."""
    q = torch.randn(len(plan.kv_len_R), case.heads, case.head_dim, dtype=case.dtype, device="cuda")
    with ExitStack() as patches:
        least = 1 if streams is not None else 1 << 30
        patches.enter_context(patch.object(hopper_decode, "LEAST_ROWS", least))
        if streams is not None:
            name = "STREAMS" if case.quantized is None else "QUANTIZED_STREAMS"
            patches.enter_context(patch.object(hopper_decode, name, ((1 << 30, streams),)))
        attends = [kernels.bind(case) for _ in caches]
        calls: list[Callable[[], object]] = [
            lambda attend=attend, kv=kv: attend(q, kv, plan)
            for attend, kv in zip(attends, caches, strict=True)
        ]
        return graph_of(calls)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="8B,0.6B")
    parser.add_argument("--variants", action="store_true", help="of the streaming kernel")
    parser.add_argument("--quantized", choices=("int8", "fp8"), help="quantized caches")
    given = parser.parse_args()
    variants = OF_CODES if given.quantized else VARIANTS
    table = hopper_decode.QUANTIZED_STREAMS if given.quantized else hopper_decode.STREAMS
    chosen = dict.fromkeys(one for _, one in table)
    streams = [None, *(variants if given.variants else chosen)]
    caches = make_caches(quantized=given.quantized is not None)
    for model in given.models.split(","):
        case, rng = replace(problem(model), quantized=given.quantized), np.random.default_rng(0)
        for rows, low, high in CASES:
            lengths = rng.integers(low, high + 1, rows).tolist()
            plan, _ = sample_plan(
                [(1, n) for n in lengths],
                block_tokens=case.block_tokens,
                window=None,
                device="cuda",
            )
            graphs = [graph(case, caches, plan, one) for one in streams]
            times = [[replay_us(one, replays=5) / LAYERS for one in graphs] for _ in range(ROUNDS)]
            us = np.median(times, axis=0).round(1).tolist()
            width = case.head_dim + SCALE_BYTES if given.quantized else 2 * case.head_dim
            floor = sum(lengths) * case.kv_heads * width * 2 / BYTES_PER_S * 1e6
            found = [
                (took, one.rows, one.heads, one.stages, one.per_sm)
                for took, one in zip(us[1:], streams[1:], strict=True)
                if one is not None
            ]
            print(
                f"{model} {rows} x {low}..{high}: floor {floor:.1f}, splits {us[0]}, streams",
                *found,
                flush=True,
            )


if __name__ == "__main__":
    main()
