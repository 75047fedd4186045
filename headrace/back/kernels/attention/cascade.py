"""When and how the kernels of triton_cascade.py are launched: in steps of many rows, whether they
share or not, since a captured graph does not know; without a shared prefix the programs leave at
once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.kernels.attention.op import AttentionProblem, Plan
from headrace.back.kernels.attention.triton_cascade import (
    ITEM_FIELDS,
    JOIN_FIELDS,
    groups_kernel,
    items_kernel,
    leaders_kernel,
    prefix_kernel,
)
from headrace.back.kernels.attention.triton_lists import Tiles, lists, numbers, row_bucket
from headrace.back.kernels.kv_write.quantized import typed
from headrace.back.kernels.triton.wrap import launch, num_sms, power_of_two

LEAST_ROWS = 64
"""Rows of a step from which on it looks for shared prefixes."""
MIN_ROWS = 8
"""Rows that share a prefix for it to be read once."""
MIN_TOKENS = 512
"""Tokens of a shared prefix for it to be read once; rows that differ before share nothing."""
MIN_SPLIT_TOKENS = 256
PROGRAMS_PER_SM = 1
"""Items that prefixes are cut into, per multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class PrefixResults:
    """What the decode kernel reads: where rows join (triton_cascade.py), and the partial results of
    the prefixes."""

    joins: torch.Tensor | None
    partial: torch.Tensor | None
    m: int


NONE = PrefixResults(joins=None, partial=None, m=0)


@dataclass(frozen=True, kw_only=True)
class PrefixLists:
    joins: torch.Tensor
    packed: torch.Tensor
    items: torch.Tensor
    num_items: int


Prefix = Callable[[torch.Tensor, torch.Tensor, Plan], PrefixResults]
"""f(q_THD, kv, plan)"""


def serves(problem: AttentionProblem, plan: Plan) -> bool:
    """Whether a step looks for shared prefixes; told by sizes alone."""
    rows, blocks = plan.block_table_RB.shape
    wide_enough = blocks * problem.block_tokens > MIN_TOKENS
    anywhere = problem.causal and not problem.reach and not problem.slopes
    return anywhere and rows >= LEAST_ROWS and wide_enough


def _lists(problem: AttentionProblem, plan: Plan, tiles: Tiles) -> PrefixLists:
    num_rows, device = len(plan.kv_len_R), plan.kv_len_R.device
    lanes = tiles.m // (problem.heads // problem.kv_heads)
    wanted = max(1, num_sms(device) * PROGRAMS_PER_SM // problem.kv_heads)
    most = wanted + num_rows // lanes + num_rows // MIN_ROWS + 1
    min_blocks = -(-MIN_TOKENS // problem.block_tokens)
    new: Any = {"dtype": torch.int32, "device": device}
    groups = torch.empty(5 * num_rows, **new)
    prefix_lists = PrefixLists(
        joins=torch.empty(num_rows * JOIN_FIELDS, **new),
        packed=torch.empty(num_rows, **new),
        items=torch.empty((most + 1) * ITEM_FIELDS, **new),
        num_items=most,
    )
    sizes: Any = {"ROWS": row_bucket(num_rows), **launch(device)}
    table = plan.block_table_RB
    leaders_kernel[(num_rows,)](
        plan.query_start_R1, plan.kv_len_R, table, groups, num_rows, table.stride(0),
        PROBE=min_blocks - 1, BLOCK_TOKENS=problem.block_tokens, CHUNK=256, **sizes,
    )  # fmt: skip
    groups_kernel[(num_rows,)](
        groups, prefix_lists.packed, prefix_lists.joins, num_rows, MIN_ROWS=MIN_ROWS,
        MIN_BLOCKS=min_blocks, BLOCK_TOKENS=problem.block_tokens, **sizes,
    )  # fmt: skip
    items_kernel[(max(num_rows, most),)](
        groups, prefix_lists.joins, prefix_lists.items, num_rows, most, wanted, LANES=lanes,
        N=tiles.n, MIN_SPLIT_TOKENS=MIN_SPLIT_TOKENS, **sizes,
    )  # fmt: skip
    return prefix_lists


def bind_prefix(problem: AttentionProblem, shared: dict[str, Any], tiles: Tiles) -> Prefix:
    """The launch for one layer."""
    kv_heads, group = problem.kv_heads, problem.heads // problem.kv_heads
    depth, lanes = power_of_two(problem.head_dim, least=16), tiles.m // group
    constants: Any = {
        name: value
        for name, value in shared.items()
        if name not in ("WINDOW", "SINKS", "ALIBI", "CAUSAL")
    }

    def prefix(q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan) -> PrefixResults:
        programs = max(1, num_sms(q_THD.device) // kv_heads)
        key = ("shared", lanes, tiles.n, kv_heads)
        prefix_lists, _ = lists.get(plan, key, prefix, lambda: _lists(problem, plan, tiles))
        partial = torch.empty(
            prefix_lists.num_items * kv_heads * tiles.m * (depth + 2),
            dtype=torch.float32,
            device=q_THD.device,
        )
        prefix_kernel[(min(programs, prefix_lists.num_items), kv_heads)](
            q_THD, *typed(kv, problem.quantized), plan.block_table_RB, plan.query_start_R1,
            prefix_lists.packed, prefix_lists.items, partial, *numbers(problem, q_THD, kv, plan),
            KV_HEADS=kv_heads, M=tiles.m, N=tiles.n, **constants, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **launch(q_THD.device),
        )  # fmt: skip
        return PrefixResults(joins=prefix_lists.joins, partial=partial, m=tiles.m)

    return prefix
