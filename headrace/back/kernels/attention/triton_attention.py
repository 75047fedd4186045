"""Paged attention in Triton: a kernel for rows with few queries (triton_decode.py) and one for the others
(triton_prefill.py); a step whose rows have one query each launches the first alone.

Launches depend on the sizes of the tensors and on `plan.max_query_len` only, so a captured graph serves every step of
its shape; lengths are read on the device. Padding rows have no query tokens; padding tokens are left uninitialised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import triton

from headrace.back.kernels.attention.op import Attention, AttentionProblem, Plan
from headrace.back.kernels.attention.triton_decode import (
    PIECE_FIELDS,
    decode_kernel,
    pieces_kernel,
)
from headrace.back.kernels.attention.triton_prefill import prefill_kernel
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    num_sms,
    power_of_two,
    unsupported,
)

MAX_HEAD_DIM = 256
ROW_BUCKETS = (16, 64, 256, 1024, 4096)
"""Rows a program reads; few sizes, so that few kernels are compiled."""
PROGRAMS_PER_SM = 2
"""Pieces the decode kernel cuts the cache into, per multiprocessor."""
MIN_PIECE = 256

Launch = Callable[[torch.Tensor, torch.Tensor, Plan, torch.Tensor], None]
"""f(q_THD, kv, plan, out_THD)"""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of a kernel's tiles: query-head pairs (at least), positions, and how it is compiled."""

    m: int
    n: int
    num_warps: int
    num_stages: int


def decode_tiles(problem: AttentionProblem) -> Tiles:
    """The decode kernel's; M holds one query of all heads that share a KV head."""
    m = power_of_two(problem.heads // problem.kv_heads, least=16)
    if problem.dtype is torch.float32 or problem.head_dim > 128:
        return Tiles(m=m, n=32, num_warps=4, num_stages=2)
    return Tiles(m=m, n=128, num_warps=4, num_stages=3)


def prefill_tiles(problem: AttentionProblem) -> Tiles:
    """The prefill kernel's."""
    least = power_of_two(problem.heads // problem.kv_heads, least=16)
    if problem.dtype is torch.float32:
        return Tiles(m=max(least, 32), n=32, num_warps=4, num_stages=1)
    if problem.head_dim > 128:
        return Tiles(m=max(least, 128), n=64, num_warps=8, num_stages=2)
    return Tiles(m=max(least, 128), n=128, num_warps=8, num_stages=3)


def bind(problem: AttentionProblem) -> Attention:
    """The kernels for one layer's heads."""
    group = problem.heads // problem.kv_heads
    shared = {
        "GROUP": group,
        "HEAD_DIM": problem.head_dim,
        "D": power_of_two(problem.head_dim, least=16),
        "BLOCK_TOKENS": problem.block_tokens,
        "WINDOW": problem.window or 0,
        "SOFTCAP": problem.softcap is not None,
    }
    decode, prefill = _bind_decode(problem, shared), _bind_prefill(problem, shared)

    def attention(q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan) -> torch.Tensor:
        assert q_THD.dtype == kv.dtype == problem.dtype, (q_THD.dtype, kv.dtype)
        assert kv.stride()[3:] == (problem.head_dim, 1) and q_THD.stride(2) == 1, (kv.stride(),)
        assert plan.block_table_RB.stride(1) == 1 or plan.block_table_RB.shape[1] == 1
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        decode(q_THD, kv, plan, out_THD)
        if plan.max_query_len > 1:
            prefill(q_THD, kv, plan, out_THD)
        return out_THD

    return attention


def _strides(
    problem: AttentionProblem, q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan
) -> tuple[int | float, ...]:
    """The numbers both kernels take: strides of queries, output, cache and table, scale, soft cap."""
    return (
        q_THD.stride(0), q_THD.stride(1), problem.heads * problem.head_dim, *kv.stride()[:3],
        plan.block_table_RB.stride(0), problem.scale, problem.softcap or 0.0,
    )  # fmt: skip


def _row_bucket(num_rows: int) -> int:
    return next(size for size in ROW_BUCKETS if size >= num_rows)


class PieceLists:
    """The lists of pieces of the plans in use. The first layer that asks for a plan makes its list, and makes it anew
    whenever it asks again (the next step, or the same step while it is captured); the layers after it read it."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, tuple[object, torch.Tensor]] = {}

    def get(
        self, plan: Plan, sizes: Hashable, owner: object, make: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """The list, and whether it was made for this call."""
        key = (id(plan), sizes)
        maker, pieces = self._lists.get(key, (owner, None))
        if maker is not owner and pieces is not None:
            return pieces, False
        if pieces is None:
            weakref.finalize(plan, self._lists.pop, key, None)
        pieces = make()
        self._lists[key] = (owner, pieces)
        return pieces, True


_LISTS = PieceLists()


def _bind_decode(problem: AttentionProblem, shared: dict[str, int | bool | str]) -> Launch:
    tiles, kv_heads = decode_tiles(problem), problem.kv_heads
    group, depth = problem.heads // kv_heads, power_of_two(problem.head_dim, least=16)
    sizes = {
        "MAX_QUERIES": tiles.m // group,
        "N": tiles.n,
        "WINDOW": problem.window or 0,
        "MIN_PIECE": MIN_PIECE,
    }

    def make(plan: Plan, most: int, wanted: int) -> torch.Tensor:
        num_rows, device = len(plan.kv_len_R), plan.kv_len_R.device
        pieces = torch.empty(most * PIECE_FIELDS, dtype=torch.int32, device=device)
        pieces_kernel[(most,)](
            plan.query_start_R1, plan.kv_len_R, pieces, num_rows, wanted, **sizes,
            ROWS=_row_bucket(num_rows), num_warps=4, **launch(device),
        )  # fmt: skip
        return pieces

    def decode(q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, out_THD: torch.Tensor) -> None:
        num_rows, device = len(plan.kv_len_R), q_THD.device
        assert num_rows * kv_heads <= COUNTERS, (num_rows, kv_heads)
        wanted = max(1, num_sms(device) * PROGRAMS_PER_SM // kv_heads)
        most = num_rows + wanted
        key = (*sizes.values(), most)
        pieces, is_new = _LISTS.get(plan, key, decode, lambda: make(plan, most, wanted))
        partial = torch.empty(
            most * kv_heads * tiles.m * (depth + 2), dtype=torch.float32, device=device
        )
        options = launch(device)
        if is_new and "launch_pdl" in options:
            options["launch_pdl"] = False  # it reads the list before it waits
        decode_kernel[(most, kv_heads)](
            q_THD, kv, out_THD, plan.block_table_RB, pieces, partial, counters(device),
            *_strides(problem, q_THD, kv, plan), KV_HEADS=kv_heads,
            GROUP_PADDED=power_of_two(group), M=tiles.m, N=tiles.n,
            COMBINED=max(2, min(16, 16 * 1024 // (power_of_two(group) * depth))),
            **shared,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
        )  # fmt: skip

    return decode


def _bind_prefill(problem: AttentionProblem, shared: dict[str, int | bool | str]) -> Launch:
    tiles, kv_heads = prefill_tiles(problem), problem.kv_heads
    group = problem.heads // kv_heads
    few = decode_tiles(problem).m // group

    def prefill(q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, out_THD: torch.Tensor) -> None:
        num_rows = len(plan.kv_len_R)
        most = triton.cdiv(len(q_THD), tiles.m // group) + num_rows
        prefill_kernel[(kv_heads, most)](
            q_THD, kv, out_THD, plan.query_start_R1, plan.kv_len_R, plan.block_table_RB,
            num_rows, *_strides(problem, q_THD, kv, plan),
            MIN_QUERIES=few + 1, M=tiles.m, N=tiles.n, ROWS=_row_bucket(num_rows), **shared,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **launch(q_THD.device),
        )  # fmt: skip

    return prefill


def _supports(problem: AttentionProblem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
    if problem.heads % problem.kv_heads:
        return f"{problem.heads} heads are no multiple of {problem.kv_heads} KV heads"
    if problem.coded or problem.sinks:
        return "knows neither codes nor sinks"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
