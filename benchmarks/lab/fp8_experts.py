"""Where a decode step of Qwen3-30B-A3B with e4m3 experts spends what its bytes do not explain: each kernel of the op
alone beside its floor, and plans next to those that are taken.

    python -m benchmarks.lab.fp8_experts [--seconds 60]

One token: `FEW` of kernels/experts_fp8/triton_experts_fp8.py (outputs of a program, inputs of a step, warps). More:
how much of shared memory holds steps on their way and programs of a multiprocessor (ROOM), and rows of a tile. By
bytes at 4.346 TB/s (H200; an H100 has 3.35 at most): a layer's 8 experts of one token take 8.7 us, 112 of 32 tokens 122
us, 128 of 256 tokens 139 us. By waves: 132 programs take items of 256 weight rows; of 32 tokens the gates and ups are
112 x 6 = 672 items, 5.09 waves that take as long as 6 (85 %), the downs 112 x 8 = 896, 6.79 of 7 (97 %); of 256 tokens
768, 5.8 of 6, and 1,024, 7.8 of 8. A line is: what, microseconds of one call, share of the floor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.h200.mixtures import inputs_of
from benchmarks.h200.quantized_experts import A3B
from benchmarks.h200.shapes import BYTES_PER_S
from headrace.back.kernels.experts.triton_dispatch import combined, dispatched
from headrace.back.kernels.experts_bytes import op as eight
from headrace.back.kernels.experts_bytes import triton_experts_bytes
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_fp8 import op as fp8
from headrace.back.kernels.experts_fp8 import triton_experts_fp8, triton_stream_fp8
from headrace.back.kernels.experts_fp8.layout import GROUP
from headrace.back.kernels.linear.scaled_rows import ScaledRows
from headrace.back.kernels.triton.timing import each_us

FEW_UP = [
    (4, 1024, 4),
    (2, 1024, 2),
    (2, 1024, 4),
    (4, 512, 2),
    (8, 1024, 4),
    (8, 1024, 8),
    (4, 1024, 2),
    (2, 2048, 4),
    (1, 2048, 2),
]
FEW_DOWN = [
    (8, 256, 4),
    (4, 256, 2),
    (4, 256, 4),
    (8, 512, 4),
    (8, 256, 2),
    (16, 256, 4),
    (16, 256, 8),
    (4, 512, 4),
    (2, 512, 2),
    (2, 256, 1),
]
STREAM = [(200, 1), (160, 1), (120, 1), (100, 2), (66, 2), (66, 3)]
"""KiB of a program's steps on their way, programs of a multiprocessor."""
EVEN = {32: (112, 96, 128), 256: (128, 96)}
"""Tokens -> numbers of programs whose waves are whole, or nearly: of 32 tokens 672 items of gates and ups are 6 x 112,
7 x 96, of 256 tokens 768 are 6 x 128 and 8 x 96. What a last wave of few items costs shows beside one program for each
multiprocessor."""
SEEDS = 6


def per_layer(run: Callable[..., Any], inputs: list[tuple[torch.Tensor, ...]]) -> float | str:
    """Microseconds of one call over routings whose experts no cache holds; what failed otherwise."""
    try:
        return each_us([partial(run, *one) for one in inputs * 2], replays=5)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"[:160]


def tell(what: str, took: float | str, floor_us: float) -> None:
    """One line."""
    if isinstance(took, str):
        print(f"{what:58} {took}", flush=True)
    else:
        print(f"{what:58} {took:8.1f} us  {floor_us / took:6.1%} of {floor_us:.1f}", flush=True)


def plans(tokens: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Names, what is patched, and the plan (None: the one that is taken)."""
    few, stream = triton_experts_fp8, triton_stream_fp8
    if tokens <= 2:
        plan = triton_experts_fp8.Fp8Plan(regime="few")
        for up in FEW_UP:
            yield f"few, up {up}", {"few": {**few.FEW, "up": up}}, plan
        for down in FEW_DOWN[1:]:
            yield f"few, down {down}", {"few": {**few.FEW, "down": down}}, plan
    if tokens >= 2:
        sms = stream.num_sms(torch.device("cuda"))
        for programs in EVEN.get(tokens, ()):
            taken = triton_experts_fp8.Fp8Plan(regime="stream", m=16 if tokens == 32 else 32)
            even = {"stream_bytes": 200 << 10, "programs": programs}
            yield f"stream of {taken.m} rows, {programs} programs", even, taken
        for m in (16, 32, 64):
            for kib, programs in STREAM if m == 16 or tokens > 128 else STREAM[:1]:
                found = {"stream_bytes": kib << 10, "programs": programs * sms}
                plan = triton_experts_fp8.Fp8Plan(regime="stream", m=m)
                yield f"stream of {m} rows, {kib} KiB, {programs} a multiprocessor", found, plan


def patched(changes: dict[str, Any], run: Callable[[], float | str]) -> float | str:
    """Runs with other constants."""
    few = patch.object(triton_experts_fp8, "FEW", changes.get("few", triton_experts_fp8.FEW))
    room = triton_stream_fp8.ROOM
    if "stream_bytes" in changes:
        room = dict.fromkeys(room, (changes["stream_bytes"], 1))
    with few, patch.object(triton_stream_fp8, "ROOM", room):
        if "programs" not in changes:
            return run()
        with patch.object(triton_stream_fp8, "num_sms", lambda device: changes["programs"]):
            return run()


def parts(experts: Any, inputs: list[tuple[torch.Tensor, ...]], m: int, floor_us: float) -> None:
    """The kernels of the streaming regime, each alone."""
    prepared = []
    for x, expert, weight in inputs:
        found = dispatched(x, expert, experts=A3B.experts, m=m, group=GROUP)
        assert found.scales_NG is not None
        rows = ScaledRows(found.rows_NE, found.scales_NG)
        multiply = partial(triton_stream_fp8.multiply, A3B, bias_XO=None, tiles=found.tiles, m=m)
        inner = ScaledRows(*multiply(rows, experts.up, is_gated=True))
        y, _ = multiply(inner, experts.down, is_gated=False)
        prepared.append((x, expert, weight, found, rows, multiply, inner, y))

    def sort(x: torch.Tensor, expert: torch.Tensor, *rest: Any) -> object:
        return dispatched(x, expert, experts=A3B.experts, m=m, group=GROUP)

    def up(
        x: Any, expert: Any, weight: Any, found: Any, rows: Any, multiply: Any, *rest: Any
    ) -> Any:
        return multiply(rows, experts.up, is_gated=True)

    def down(x: Any, e: Any, w: Any, f: Any, r: Any, multiply: Any, inner: Any, y: Any) -> Any:
        return multiply(inner, experts.down, is_gated=False)

    def add(x: Any, e: Any, weight: Any, found: Any, r: Any, m: Any, i: Any, y: Any) -> Any:
        return combined(y, weight, found.places_P, x)

    for name, run, share in (
        ("rows sorted and quantized", sort, 0), ("gates and ups", up, 2 / 3), ("downs", down, 1 / 3),
        ("combined", add, 0),
    ):  # fmt: skip
        tell(f"  {name} ({m} rows a tile)", per_layer(run, prepared), share * floor_us)


def main() -> None:
    """Prints lines until the time is over, most wanted first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    until = time.monotonic() + parser.parse_args().seconds
    generator = torch.Generator(device="cuda").manual_seed(1)
    problem = fp8.ExpertsFp8Problem(mixture=A3B, group=None)
    experts = fp8.random_experts(problem, generator)
    one_bytes = experts.num_bytes / A3B.experts
    floors = {}
    for tokens in (1, 32, 256, 2):
        inputs = [inputs_of(A3B, tokens, seed) for seed in range(SEEDS)]
        distinct = sum(len(one[1].unique()) for one in inputs) / SEEDS
        floors[tokens] = floor_us = distinct * one_bytes / BYTES_PER_S * 1e6
        print(f"{tokens} tokens, {distinct:.1f} of {A3B.experts} experts", flush=True)
        taken = triton_experts_fp8.bind(problem, experts)
        tell("  as it is", per_layer(taken, inputs), floor_us)
        if tokens > 1:
            m = triton_experts_fp8.plan_for(problem, tokens, streamed=True).m
            parts(experts, inputs, m, floor_us)
        for name, changes, plan in plans(tokens):
            if time.monotonic() > until:
                return
            run = triton_experts_fp8.bind(problem, experts, always=plan)
            tell(f"  {name}", patched(changes, partial(per_layer, run, inputs)), floor_us)
    for form in (ByteForm(None), ByteForm(32, floats=True)):
        weight_only = eight.ExpertsBytesProblem(mixture=A3B, form=form)
        bytes_experts = eight.random_experts(weight_only, generator)
        bound = triton_experts_bytes.bind(weight_only, bytes_experts)
        for tokens, floor_us in floors.items():
            if time.monotonic() > until:
                return
            inputs = [inputs_of(A3B, tokens, seed) for seed in range(SEEDS)]
            tell(f"{form}, {tokens} tokens", per_layer(bound, inputs), floor_us)


if __name__ == "__main__":
    main()
