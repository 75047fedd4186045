"""Paged attention: tiles and splits tried, against the memory's floor (decode) and the matrix units' rate (prefill)."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headrace.back.kernels.attention import cascade, hopper, hopper_decode
from headrace.back.kernels.attention import triton_attention as kernels
from headrace.back.kernels.attention.hopper import HopperTiles
from headrace.back.kernels.attention.op import AttentionProblem, SamplePlan, sample_plan
from headrace.back.kernels.attention.triton_lists import Tiles
from headrace.back.kernels.kv_write.quantized import random_quantized_cache
from headrace.back.kernels.op import sample_generator
from headrace.back.kernels.triton.timing import each_us

MODELS = {"8B": (32, 8), "0.6B": (16, 8)}
DECODE = [(1, 256), (1, 8192), (8, 256), (32, 256), (32, 1024), (256, 256), (256, 1024)]
PREFILL = {
    "1 x 8192": [(8192, 8192)],
    "16 x 1024": [(1024, 1024)] * 16,
    "1 x 1024": [(1024, 1024)],
    "2048 of 8192": [(2048, 8192)],
    "2048 beside 64 x 1024": [(1, 1024)] * 64 + [(1024, 1024)] * 2,
    "2048 beside 256 x 1024": [(1, 1024)] * 256 + [(1024, 1024)] * 2,
}
"""Rows of (query tokens, KV length)."""
DECODE_TILES = [
    Tiles(m=16, n=n, num_warps=warps, num_stages=stages)
    for n, warps, stages in (
        (64, 4, 3),
        (64, 4, 5),
        (64, 2, 3),
        (128, 4, 3),
        (128, 4, 5),
        (128, 8, 3),
        (256, 8, 1),
    )
]
PREFILL_TILES = [
    Tiles(m=m, n=n, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        (128, 64, 8, 3), (128, 128, 8, 3), (256, 64, 8, 3),
    )
]  # fmt: skip
HOPPER_TILES = [
    HopperTiles(n=128, stages=2),
    HopperTiles(n=128, stages=3),
    HopperTiles(n=64, stages=4),
]
QUANTIZED = [(1, 8192), (32, 1024), (256, 1024)]
CODED_TILES = [
    Tiles(m=16, n=n, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((64, 4, 3), (128, 4, 3), (128, 8, 3), (128, 4, 5), (256, 8, 3))
]
PIECES = [(2, 256), (2, 128), (4, 128), (8, 64)]
"""(programs per multiprocessor, least positions of a split)."""


def problem(model: str, quantized: str | None = None) -> AttentionProblem:
    """A layer of the model."""
    heads, kv_heads = MODELS[model]
    return AttentionProblem(
        device="cuda", dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=128,
        block_tokens=16, scale=128**-0.5, quantized=quantized,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _tensors(
    heads: int, kv_heads: int, rows: tuple[tuple[int, int], ...], layers: int, quantized: bool
) -> tuple[torch.Tensor, list[torch.Tensor], SamplePlan]:
    plan, num_blocks = sample_plan(list(rows), block_tokens=16, window=None, device="cuda")
    new = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(sum(queries for queries, _ in rows), heads, 128, **new)
    if quantized:
        shape = (num_blocks, kv_heads, 16, 128)
        one = random_quantized_cache(shape, generator=sample_generator(), device="cuda")
    else:
        one = torch.randn(num_blocks, 2, kv_heads, 16, 128, **new)
    return q, [one, *(one.clone() for _ in range(layers - 1))], plan


def calls(
    case: AttentionProblem, rows: list[tuple[int, int]], layers: int
) -> list[Callable[[], object]]:
    """One call per layer, each with its own cache."""
    q, caches, plan = _tensors(
        case.heads, case.kv_heads, tuple(rows), layers, case.quantized is not None
    )
    attends = [kernels.bind(case) for _ in caches]
    return [
        lambda attend=attend, kv=kv: attend(q, kv, plan)
        for attend, kv in zip(attends, caches, strict=True)
    ]


@contextmanager
def _patched(tiles: Tiles, name: str) -> Iterator[None]:
    """The kernels that have a program a split, with these tiles."""

    def chosen(case: AttentionProblem, rows: int = 1) -> Tiles:
        return replace(tiles, m=max(tiles.m, 16))

    with (
        patch.object(kernels, name, chosen),
        patch.object(hopper_decode, "LEAST_ROWS", 1 << 30),
    ):
        yield


def decode(rate: float) -> list[dict[str, object]]:
    """Decode rows: microseconds and the share of the memory's rate, every variant."""
    found = []
    for model, (rows, length) in itertools.product(MODELS, DECODE):
        case = problem(model)
        kv_bytes = rows * length * 2 * case.kv_heads * 128 * 2
        layers = max(2, min(16, (400 << 20) // kv_bytes + 1))
        tried = []
        for tiles, (per_sm, least) in itertools.product(DECODE_TILES, PIECES):
            with (
                _patched(tiles, "decode_tiles"),
                patch.object(kernels, "PROGRAMS_PER_SM", per_sm),
                patch.object(kernels, "MIN_SPLIT_TOKENS", least),
            ):
                us = each_us(calls(case, [(1, length)] * rows, layers), replays=5)
            tried.append((round(us, 2), tiles.n, tiles.num_warps, tiles.num_stages, per_sm, least))
        tried.sort()
        floor = kv_bytes / rate * 1e6
        row = {
            "model": model, "rows": rows, "length": length, "floor_us": round(floor, 2),
            "best_us": tried[0][0], "of_floor": round(floor / tried[0][0], 3), "tried": tried,
        }  # fmt: skip
        found.append(row)
        print({**row, "tried": tried[:5]}, flush=True)
    return found


def prefill() -> list[dict[str, object]]:
    """Steps with long rows: microseconds and TFLOP/s (what is seen, counted), every variant; and torch's attention on
    dense keys and values where all rows are alike."""
    found = []
    for model, (name, rows) in itertools.product(MODELS, PREFILL.items()):
        case = problem(model)
        seen = sum(count * (2 * length - count + 1) / 2 for count, length in rows)
        flops = 4 * seen * case.heads * 128
        tried = []
        for variant in (*PREFILL_TILES, *HOPPER_TILES):
            with variant_of(variant):
                us = each_us(calls(case, rows, 4), replays=3)
            tried.append((round(us, 1), round(flops / us / 1e6), str(variant)))
        tried.sort()
        row = {
            "model": model,
            "rows": name,
            "tried": tried,
            "torch_dense": dense(case, rows, flops),
        }
        found.append(row)
        print(row, flush=True)
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "window 512": {"window": 512},
    "window 4096": {"window": 4096},
    "chunks of 8192": {"chunk": 8192},
    "soft cap": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "heads of 256": {"head_dim": 256, "heads": 16, "kv_heads": 4},
    "heads of 256, window 4096, soft cap": {
        "head_dim": 256,
        "heads": 16,
        "kv_heads": 4,
        "window": 4096,
        "softcap": 50.0,
    },
}
WINDOWED = {
    "1 x 8192": [(8192, 8192)],
    "1 x 2048": [(2048, 2048)],
    "16 x 1024": [(1024, 1024)] * 16,
}


def seen_by(case: AttentionProblem, length: int) -> int:
    """Positions that the queries of a prompt see, together."""
    if case.chunk:
        chunks, rest = divmod(length, case.chunk)
        return chunks * case.chunk * (case.chunk + 1) // 2 + rest * (rest + 1) // 2
    window = min(case.window or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def variants(names: list[str]) -> list[dict[str, object]]:
    """Prompts of 32 heads over 8, or 16 of 256 over 4, with windows, chunks, caps and sinks: microseconds and TFLOP/s
    of what is seen, by tiles of Hopper's kernel and by the generic one. `names`: of the variants."""
    found = []
    for name, (rows_name, rows) in itertools.product(names, WINDOWED.items()):
        more = VARIANTS[name]
        case = replace(problem("8B"), **more)
        case = replace(case, scale=case.head_dim**-0.5)
        plan, blocks = sample_plan(rows, block_tokens=16, window=None, device="cuda")
        new = {"device": "cuda", "dtype": torch.bfloat16}
        q = torch.randn(sum(count for count, _ in rows), case.heads, case.head_dim, **new)
        kv = torch.randn(blocks, 2, case.kv_heads, 16, case.head_dim, **new)
        given = (torch.zeros(case.heads, device="cuda"),) if case.sinks else ()
        flops = 4 * sum(seen_by(case, length) for _, length in rows) * case.heads * case.head_dim
        row: dict[str, object] = {"variant": name, "rows": rows_name}
        wide = case.head_dim > 128
        tiles = (64, 2), *(() if wide else ((128, 2), (64, 4)))
        for n, stages in tiles:
            own = HopperTiles(n=n, stages=stages)
            with patch.object(hopper, "tiles_for", lambda *_, own=own: own):
                row[f"{n}, {stages}"] = _rated(kernels.bind(case, *given), q, kv, plan, flops)
        with patch.object(hopper, "unfit", lambda _: "another is measured"):
            row["generic"] = _rated(kernels.bind(case, *given), q, kv, plan, flops)
        found.append(row)
        print(row, flush=True)
    return found


def _rated(
    attend: Callable[..., object], q: torch.Tensor, kv: torch.Tensor, plan: SamplePlan, flops: float
) -> str:
    try:
        us = each_us([partial(attend, q, kv, plan)] * 2, replays=3)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"[:150]
    return f"{us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s"


def main() -> None:
    """Prints and writes what `variants` finds: python -m benchmarks.h200.attention OUT [VARIANT ...]."""
    print(torch.cuda.get_device_name(), flush=True)
    found = variants(sys.argv[2:] or list(VARIANTS))
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


def quantized(rate: float) -> list[dict[str, object]]:
    """Decode rows and a long prompt over quantized caches: microseconds."""
    found = []
    for quantized, (rows, length) in itertools.product(("int8", "fp8"), QUANTIZED):
        case = problem("8B", quantized)
        kv_bytes = rows * length * 2 * case.kv_heads * 132
        layers = max(2, min(16, (400 << 20) // kv_bytes + 1))
        tried = []
        for tiles in CODED_TILES:
            with _patched(tiles, "decode_tiles"):
                us = each_us(calls(case, [(1, length)] * rows, layers), replays=5)
            tried.append((round(us, 2), str(tiles)))
        tried.sort()
        floor = round(kv_bytes / rate * 1e6, 2)
        found.append(
            {
                "quantized": quantized,
                "rows": rows,
                "length": length,
                "floor_us": floor,
                "tried": tried,
            }
        )
        print(found[-1], flush=True)
    for quantized in ("int8", "fp8"):
        us = each_us(calls(problem("8B", quantized), [(8192, 8192)], 2), replays=3)
        found.append({"quantized": quantized, "rows": "prefill 1 x 8192", "us": round(us, 1)})
        print(found[-1], flush=True)
    return found


def shared() -> list[dict[str, object]]:
    """Decode rows that begin with the same tokens and have 256 of their own: microseconds with and without cascade; and
    what looking for shared prefixes costs where there are none."""
    found = []
    for rows, prefix in itertools.product((64, 128, 256), (0, 2048, 4096, 8192)):
        own = 256 if prefix else 1024
        case = problem("8B")
        plan, blocks = sample_plan([(1, own)] * rows, block_tokens=16, window=None, device="cuda")
        count = prefix // 16
        first = torch.arange(blocks, blocks + count, device="cuda", dtype=torch.int32)
        plan = replace(
            plan,
            block_table_RB=torch.cat((first.expand(rows, -1), plan.block_table_RB), 1).contiguous(),
            kv_len_R=plan.kv_len_R + prefix,
        )
        new = {"device": "cuda", "dtype": torch.bfloat16}
        q = torch.randn(rows, case.heads, 128, **new)
        caches = [torch.randn(blocks + count, 2, case.kv_heads, 16, 128, **new) for _ in range(2)]
        row: dict[str, object] = {"rows": rows, "prefix": prefix, "own": own}
        for name, least in (("alone", 1 << 20), ("cascade", 1)):
            with patch.object(cascade, "LEAST_ROWS", least):
                attends = [kernels.bind(case) for _ in range(8)]
                row[name] = round(
                    each_us(
                        [partial(f, q, caches[i % 2], plan) for i, f in enumerate(attends)],
                        replays=5,
                    ),
                    1,
                )
        found.append(row)
        print(row, flush=True)
    return found


def variant_of(variant: Tiles | HopperTiles) -> AbstractContextManager[object]:
    """The prefill kernel with these sizes of tiles."""
    if isinstance(variant, HopperTiles):
        return patch.object(hopper, "tiles_for", lambda *_: variant)
    stack = ExitStack()
    stack.enter_context(patch.object(hopper, "unfit", lambda case: "another is measured"))
    stack.enter_context(_patched(variant, "prefill_tiles"))
    return stack


def dense(
    case: AttentionProblem, rows: list[tuple[int, int]], flops: float
) -> dict[str, tuple[float, int] | str]:
    """What torch's own kernels take, and TFLOP/s, where all rows are alike and new."""
    count, length = rows[0]
    if len(set(rows)) > 1 or count != length:
        return {}
    q, k = (
        torch.randn(len(rows), heads, length, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (case.heads, case.kv_heads)
    )
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=True
    )
    found: dict[str, tuple[float, int] | str] = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        try:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name)):
                us = each_us([attend] * 4, replays=3)
            found[name] = (round(us, 1), round(flops / us / 1e6))
        except Exception as error:
            found[name] = str(error)[:80]
    return found


def _compile(task: tuple[str, str, Tiles | HopperTiles, int]) -> None:
    model, name, tiles, rows = task
    queries = 1 if name != "prefill" else 40
    quantized = name if name in ("int8", "fp8") else None
    with variant_of(tiles) if name == "prefill" else _patched(tiles, "decode_tiles"):
        try:
            calls(problem(model, quantized), [(queries, 40)] * rows, 1)[0]()
        except Exception as error:
            print("compile", task, type(error).__name__, str(error)[:100], flush=True)
    torch.cuda.synchronize()


def compile_all(*, decodes: bool = True, processes: int = 14) -> None:
    """Fills Triton's cache by many processes."""
    tasks = [
        (model, "prefill", tiles, rows)
        for model in MODELS
        for tiles in (*HOPPER_TILES, *PREFILL_TILES)
        for rows in (1, 66, 258)
    ]
    if decodes:
        tasks += [
            (model, "decode_tiles", tiles, rows)
            for model in MODELS
            for tiles in DECODE_TILES
            for rows in (1, 32, 256)
        ]
    tasks += [("8B", "decode_tiles", Tiles(m=16, n=128, num_warps=4, num_stages=3), 64)]
    tasks += [
        ("8B", quantized, tiles, rows)
        for quantized in ("int8", "fp8")
        for tiles in CODED_TILES
        for rows in (1, 32, 256)
    ]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, tasks, chunksize=2)


def random_rows(generator: torch.Generator, count: int, longest: int) -> list[tuple[int, int]]:
    """Decode rows first, then others."""
    rows = []
    for _ in range(count):
        length = int(torch.randint(1, longest, (), generator=generator))
        queries = (
            1
            if torch.rand((), generator=generator) < 0.5
            else int(torch.randint(1, length + 1, (), generator=generator))
        )
        rows.append((queries, length))
    return sorted(rows, key=lambda row: row[0] != 1)


def poison(kv: torch.Tensor, plan: SamplePlan) -> None:
    """NaN wherever no row has written."""
    used = torch.zeros(kv.shape[0], kv.shape[3], dtype=torch.bool)
    for row, length in enumerate(plan.host_kv_len.tolist()):
        position = torch.arange(length)
        used[
            plan.block_table_RB[row].cpu()[position // kv.shape[3]].long(), position % kv.shape[3]
        ] = True
    used[0] = False
    kv.movedim(3, 1)[~used.to(kv.device)] = float("nan")


if __name__ == "__main__":
    main()
