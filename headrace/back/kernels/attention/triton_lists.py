"""Sizes of tiles, and lists of work that kernels make on the device once a step, for all layers
that share a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from headrace.back.kernels.attention.op import AttentionProblem, Plan
from headrace.back.kernels.triton.room import shared_bytes
from headrace.back.kernels.triton.wrap import power_of_two

ROW_BUCKETS = (16, 64, 256, 1024, 4096)
"""Rows a program reads; few sizes, so that few kernels are compiled."""

WorkList = TypeVar("WorkList")
Launch = Callable[[torch.Tensor, torch.Tensor, Plan, torch.Tensor, torch.Tensor | None], None]
"""f(q_THD, kv, plan, out_THD, lse_TH)"""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of a kernel's tiles: query-head pairs (at least), positions, and how it is compiled."""

    m: int
    n: int
    num_warps: int
    num_stages: int


def fitted(tiles: Tiles, problem: AttentionProblem) -> Tiles:
    """The same, or smaller ones where keys, values, queries and weights would not fit the device's
    shared memory."""
    depth = power_of_two(problem.head_dim, least=16) * problem.dtype.itemsize
    least = power_of_two(problem.heads // problem.kv_heads, least=16)
    room = shared_bytes()

    def taken(tiles: Tiles) -> int:
        # Places are read from the table a stage before what lies there: of five stages two hold
        # keys and values.
        buffers = tiles.num_stages // 2 if tiles.num_stages > 4 else max(1, tiles.num_stages - 1)
        pipeline = buffers * 2 * tiles.n * depth
        return tiles.m * depth + pipeline + tiles.m * tiles.n * problem.dtype.itemsize

    while taken(tiles) > room:
        if tiles.n > 32:
            tiles = replace(tiles, n=tiles.n // 2)
        elif tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.m > least:
            tiles = replace(tiles, m=tiles.m // 2)
        elif tiles.n > 16:
            tiles = replace(tiles, n=16)
        else:
            break
    return tiles


def numbers(
    problem: AttentionProblem, q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan
) -> tuple[int | float, ...]:
    """What every kernel takes: strides of queries, output, cache and table, scale, soft cap."""
    return (
        q_THD.stride(0), q_THD.stride(1), problem.heads * problem.head_dim, *kv.stride()[:3],
        plan.block_table_RB.stride(0), problem.scale, problem.softcap or 0.0,
    )  # fmt: skip


def row_bucket(num_rows: int) -> int:
    """How many rows a program reads."""
    return next(size for size in ROW_BUCKETS if size >= num_rows)


class PlanLists:
    """The lists of the plans in use. The first layer that asks for a plan makes its list, and makes
    it anew whenever it asks again (the next step, or the same step while it is captured); the
    layers after it read it."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, tuple[object, Any]] = {}

    def get(
        self, plan: Plan, sizes: Hashable, owner: object, make: Callable[[], WorkList]
    ) -> tuple[WorkList, bool]:
        """The list, and whether it was made for this call."""
        key = (id(plan), sizes)
        maker, work_list = self._lists.get(key, (owner, None))
        if maker is not owner and work_list is not None:
            return work_list, False
        if work_list is None:
            weakref.finalize(plan, self._lists.pop, key, None)
        work_list = make()
        self._lists[key] = (owner, work_list)
        return work_list, True


lists = PlanLists()
