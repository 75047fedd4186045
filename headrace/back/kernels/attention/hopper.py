"""When and how the kernel of triton_prefill_hopper.py is launched: from the list that
triton_tiles.py makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from headrace.back.kernels.attention.op import AttentionProblem, Plan
from headrace.back.kernels.attention.triton_lists import Launch, lists, row_bucket
from headrace.back.kernels.attention.triton_tiles import TILE_FIELDS, tiles_kernel
from headrace.back.kernels.kv_write.quantized import typed, values_and_scales
from headrace.back.kernels.triton.wrap import interpreted, launch, num_sms

LOG2E = 1.4426950408889634
PAIRS = 64
"""Query-head pairs of each of the two groups of warps that attend."""


@dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """n: positions of a tile; stages: how many tiles of keys, and as many of values, are in shared
    memory; slots: how many quantized tiles, of keys or values."""

    n: int = 128
    stages: int = 2
    slots: int = 4


TILES, SHORT_TILES = HopperTiles(), HopperTiles(n=64, stages=4)
WIDE_TILES = HopperTiles(n=64, stages=2)
"""Of heads of 256."""
SHORT_TOKENS, SHORT_REACH = 2048, 1024
"""Up to so many tokens of a row, or positions that a query sees, less is computed in vain with
SHORT_TILES than their loops cost. On an H200, TFLOP/s with TILES and SHORT_TILES: a prompt of 8,192
611 and 578, sixteen of 1,024 318 and 383, windows of 512 347 and 408, soft caps 374 and 397."""


def tiles_for(
    problem: AttentionProblem, tokens: int, short_tokens: int | None = None
) -> HopperTiles:
    """Those of a step of so many tokens a row; up to `short_tokens` (None: SHORT_TOKENS) such rows
    are short."""
    if problem.head_dim > 128:
        return WIDE_TILES
    if problem.quantized or problem.block_tokens > SHORT_TILES.n:
        return TILES
    if problem.softcap is not None or 0 < abs(problem.reach) <= SHORT_REACH:
        return SHORT_TILES
    most = SHORT_TOKENS if short_tokens is None else short_tokens
    return SHORT_TILES if tokens <= most else TILES


def unfit(problem: AttentionProblem) -> str | None:
    """Why this kernel does not serve a problem."""
    if problem.device != "cuda" or interpreted() or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if torch.cuda.get_device_capability() != (9, 0):
        return "asks for the TMA and the matrix instructions of compute capability 9.0"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {problem.dtype}"
    if problem.quantized not in (None, "int8", "fp8"):
        return f"reads caches of int8 and fp8, not {problem.quantized}"
    if problem.quantized and problem.dtype is not torch.bfloat16:
        return f"dequantizes to bfloat16, not {problem.dtype}"
    if problem.head_dim not in (64, 128, 256):
        return f"knows heads of 64, 128 and 256, not {problem.head_dim}"
    if problem.quantized and (reason := not_plain(problem)):
        return reason
    if problem.slopes:
        return "knows no ALiBi"
    if not problem.causal:
        return "knows causal queries only"
    tiles = tiles_for(problem, SHORT_TOKENS + 1)
    if problem.block_tokens < 8 or tiles.n % problem.block_tokens:
        return f"blocks of {problem.block_tokens} tokens do not fill tiles of {tiles.n}"
    if problem.heads // problem.kv_heads > PAIRS:
        return f"more than {PAIRS} query heads share a KV head"
    return None


def not_plain(problem: AttentionProblem) -> str | None:
    """What Hopper's other kernels do not serve."""
    if problem.head_dim not in (64, 128):
        return f"knows heads of 64 and 128, not {problem.head_dim}"
    if problem.reach or problem.softcap is not None or problem.sinks:
        return "knows no windows, no chunks, no soft cap and no sinks"
    return None


def descriptors(problem: AttentionProblem, heads: int) -> Callable[[torch.Tensor], Any]:
    """How the TMA is told of a cache: as rows of head_dim, those of so many heads of a block at a
    time; of quantized as heads of a block, whose scales lie between them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    depth, quantized = problem.head_dim, problem.quantized is not None
    box = (
        [heads, problem.block_tokens, depth] if quantized else [heads * problem.block_tokens, depth]
    )
    wide = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[problem.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int8 if quantized else wide)
    known: dict[tuple[int, int], TensorDescriptor] = {}

    def descriptor(kv: torch.Tensor) -> TensorDescriptor:
        key = kv.data_ptr(), kv.shape[0]
        cached = known.get(key)
        if cached is None or cached.base.data_ptr() != key[0]:  # of a cache that was given back
            known.clear()
            tiles = values_and_scales(kv)[0].flatten(0, 2) if quantized else kv.view(-1, depth)
            cached = known[key] = TensorDescriptor.from_tensor(tiles, box, layout)
        return cached

    return descriptor


def bind_prefill(
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None = None,
    min_queries: int = 2,
    short_tokens: int | None = None,
) -> Launch:
    """The launch for rows with at least `min_queries` query tokens. `short_tokens`: see
    tiles_for."""
    from headrace.back.kernels.attention.triton_prefill_hopper import prefill_hopper_kernel
    from headrace.back.kernels.attention.triton_prefill_quantized import prefill_quantized_kernel

    kv_heads, head_dim, block_tokens = problem.kv_heads, problem.head_dim, problem.block_tokens
    group = problem.heads // kv_heads
    queries = 2 * (PAIRS // group)
    factor = inner = problem.scale * LOG2E
    if problem.softcap is not None:
        inner, factor = problem.scale / problem.softcap, problem.softcap * LOG2E
    softcap = 0 if problem.softcap is None else 2 if problem.dtype is torch.bfloat16 else 1
    cache_of = descriptors(problem, 1)
    sizes: dict[str, Any] = {
        "GROUP": group, "KV_HEADS": kv_heads, "BLOCK_TOKENS": block_tokens,
    }  # fmt: skip

    def make(plan: Plan, most: int) -> torch.Tensor:
        device = plan.kv_len_R.device
        num_rows = len(plan.kv_len_R)
        tile_list = torch.empty((most + 1) * TILE_FIELDS, dtype=torch.int32, device=device)
        tiles_kernel[(most,)](
            plan.query_start_R1, plan.kv_len_R, tile_list, num_rows, QUERIES=queries,
            MIN_QUERIES=min_queries, ROWS=row_bucket(num_rows), num_warps=4, **launch(device),
        )  # fmt: skip
        return tile_list

    def prefill(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        most = triton.cdiv(len(q_THD), queries) + len(plan.kv_len_R)
        key = ("tiles", queries, min_queries, most)
        tile_list, _ = lists.get(plan, key, prefill, lambda: make(plan, most))
        lists_of = tile_list, plan.block_table_RB
        strides = (
            q_THD.stride(0), q_THD.stride(1), problem.heads * head_dim,
            plan.block_table_RB.stride(0), factor,
        )  # fmt: skip
        grid = (num_sms(q_THD.device),)
        tiles = tiles_for(problem, len(q_THD) // max(1, len(plan.kv_len_R)), short_tokens)
        constants = {**sizes, "N": tiles.n, "STAGES": tiles.stages, "LSE": lse_TH is not None}
        if problem.quantized is not None:
            _, scales = typed(kv, problem.quantized)
            prefill_quantized_kernel[grid](
                cache_of(kv), scales, q_THD, out_THD, lse_TH, *lists_of, *strides, **constants,
                SLOTS=tiles.slots, QUANTIZED=problem.quantized, num_warps=4,
            )  # fmt: skip
        else:
            prefill_hopper_kernel[grid](
                cache_of(kv), q_THD, out_THD, lse_TH, sinks_H, *lists_of, *strides, inner,
                **constants, WINDOW=problem.reach, SOFTCAP=softcap,
                SINKS=problem.sinks, num_warps=4,
            )  # fmt: skip

    return prefill
