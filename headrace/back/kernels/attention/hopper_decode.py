"""When and how the kernel of triton_decode_hopper.py is launched: from the runs that triton_runs.py
makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.attention import hopper
from headrace.back.kernels.attention.cascade import PrefixResults
from headrace.back.kernels.attention.op import AttentionProblem, Plan
from headrace.back.kernels.attention.triton_lists import lists, row_bucket
from headrace.back.kernels.attention.triton_runs import RUN_FIELDS, runs_kernel
from headrace.back.kernels.kv_write.quantized import typed
from headrace.back.kernels.triton.wrap import COUNTERS, counters, launch, num_sms, power_of_two

MOST_QUERIES = 64
"""Query-head pairs of a tile: columns."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """rows: positions and heads of a tile, those of one matrix instruction or two; heads: KV heads
    of a tile, at most; per_sm: programs; stages: tiles on their way to a program; least: tiles of a
    run; near: tiles by which cuts are moved to the ends of rows; registers: of a thread at most,
    None: as the compiler thinks."""

    rows: int = 64
    heads: int = 4
    per_sm: int = 2
    stages: int = 3
    least: int = 2
    near: int = 8
    registers: int | None = None


STREAMS: tuple[tuple[int, Streams], ...] = (
    (63, Streams(heads=1)),
    (192, Streams(heads=2)),
    (1 << 30, Streams()),
)
"""By rows of a step, up to so many. Measured on an H200 (benchmarks/h200/kernels.md): of few rows
no position should wait for another, of many the copies should be large."""
QUANTIZED_STREAMS: tuple[tuple[int, Streams], ...] = (
    (63, Streams(heads=2, per_sm=3, registers=168)),
    (192, Streams()),
    (1 << 30, Streams(rows=128, stages=2)),
)
"""The same for quantized caches, where it is the dequantizing that takes the time: more programs,
or fewer tiles."""
TWO_PROGRAMS_COLUMNS = 32
"""Columns of rows with drafts above which three tiles on their way, queries and weights would leave
the shared memory of a multiprocessor no room for a second program."""
MOST_VERIFYING_ROWS = 64
"""Rows of a step that verifies drafts up to which this kernel serves it."""
LEAST_ROWS = 8
"""Rows of a step from which on this kernel serves it; of fewer the time goes to adding up what
programs share."""

Decode = Callable[
    [torch.Tensor, torch.Tensor, Plan, torch.Tensor, torch.Tensor | None, PrefixResults], None
]
"""f(q_THD, kv, plan, out_THD, lse_TH, shared prefixes)"""

StreamChoice = Callable[[Plan, torch.Tensor, bool], tuple[int, Decode | None]]
"""f(plan, kv, whether its rows have few queries each) -> up to how many queries of a row are this
kernel's (0: none), and its launch"""


def _streams(problem: AttentionProblem) -> tuple[tuple[int, Streams], ...]:
    return STREAMS if problem.quantized is None else QUANTIZED_STREAMS


def _streams_for(problem: AttentionProblem, rows: int) -> tuple[int, Streams]:
    return next((most, streams) for most, streams in _streams(problem) if rows <= most)


def plan_name(problem: AttentionProblem, rows: int, queries: int = 1) -> str:
    """What the self-check calls the streams of a step of so many rows of up to so many queries."""
    most, _ = _streams_for(problem, rows)
    name = "decode by TMA" if queries == 1 else f"{queries} queries a row by TMA"
    return f"{name}, up to {most} rows" if most < 1 << 30 else f"{name}, many rows"


def heads_of(problem: AttentionProblem, streams: Streams, queries: int = 1) -> int:
    """KV heads of a tile: as many beside each other as there are rows for, and as are wanted; with
    several queries of a row, as have columns."""
    columns = problem.heads // problem.kv_heads * queries
    most = streams.heads if queries == 1 else min(streams.heads, max(1, MOST_QUERIES // columns))
    heads = streams.rows // problem.block_tokens
    while heads > 1 and (heads > most or problem.kv_heads % heads):
        heads //= 2
    return heads


def unfit(problem: AttentionProblem) -> str | None:
    """Why this kernel does not serve a problem."""
    if reason := hopper.unfit(problem) or hopper.not_plain(problem):
        return reason
    streams = [one for _, one in _streams(problem)]
    rows = min(one.rows for one in streams)
    if problem.block_tokens > rows:
        return f"blocks of {problem.block_tokens} tokens are above {rows}"
    most = max(heads_of(problem, one) for one in streams)
    if most * problem.heads // problem.kv_heads > MOST_QUERIES:
        return f"tiles have more than {MOST_QUERIES} query heads"
    return None


def serves(plan: Plan, kv: torch.Tensor) -> bool:
    """Whether this kernel takes the rows with one query of a step; told by sizes alone."""
    return len(plan.kv_len_R) >= LEAST_ROWS and kv.is_contiguous()


def verified_queries(problem: AttentionProblem, *, rows: int, queries: int) -> int | None:
    """The queries of a row that the kernel is compiled for, in a step of so many rows that verify
    drafts and have up to `queries`; None: it does not serve such a step."""
    padded = power_of_two(queries)
    columns = problem.heads // problem.kv_heads * padded
    if rows > MOST_VERIFYING_ROWS or columns > MOST_QUERIES:
        return None
    return padded if 1 < queries <= power_of_two(problem.verify_queries) else None


def bind_streams(problem: AttentionProblem, without: frozenset[str]) -> StreamChoice:
    """Which rows of a step are this kernel's: those with one query, or all where they
    verify drafts."""
    bound: dict[int, Decode] = {}
    is_unfit = unfit(problem) is not None

    def streams(plan: Plan, kv: torch.Tensor, few: bool) -> tuple[int, Decode | None]:
        rows, queries = len(plan.kv_len_R), 1
        if few:
            size = {"rows": rows, "queries": plan.max_query_len}
            queries = verified_queries(problem, **size) or 0
        if is_unfit or not queries or not serves(plan, kv):
            return 0, None
        if plan_name(problem, rows, queries) in without:
            return 0, None
        if queries not in bound:
            bound[queries] = bind_decode(problem, queries)
        return queries, bound[queries]

    return streams


def bind_decode(problem: AttentionProblem, queries: int = 1) -> Decode:
    """The launch for a step's rows with up to so many queries."""
    bound: dict[Streams, Decode] = {}

    def decode(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
        common: PrefixResults,
    ) -> None:
        _, streams = _streams_for(problem, len(plan.kv_len_R))
        if streams not in bound:
            bound[streams] = _bound(problem, streams, queries)
        bound[streams](q_THD, kv, plan, out_THD, lse_TH, common)

    return decode


def _bound(problem: AttentionProblem, streams: Streams, most_queries: int) -> Decode:
    from headrace.back.kernels.attention.triton_decode_hopper import decode_hopper_kernel

    kv_heads, depth, block_tokens = problem.kv_heads, problem.head_dim, problem.block_tokens
    heads, group = heads_of(problem, streams, most_queries), problem.heads // kv_heads
    blocks, shares = streams.rows // (heads * block_tokens), kv_heads // heads
    columns = power_of_two(heads * group * most_queries, least=8)
    crowded = most_queries > 1 and columns > TWO_PROGRAMS_COLUMNS
    stages = min(streams.stages, 2) if crowded else streams.stages
    cache_of = hopper.descriptors(problem, heads)

    def make(plan: Plan, most: int, joins: torch.Tensor | None) -> torch.Tensor:
        num_rows, device = len(plan.kv_len_R), plan.kv_len_R.device
        runs = torch.empty(most * RUN_FIELDS, dtype=torch.int32, device=device)
        runs_kernel[(most,)](
            plan.query_start_R1, plan.kv_len_R, joins, runs, num_rows, most,
            QUERIES=most_queries, POSITIONS=blocks * block_tokens, LEAST=streams.least,
            NEAR=streams.near, ROWS=row_bucket(num_rows), RUNS=power_of_two(most),
            SHARED=joins is not None, num_warps=4, **launch(device),
        )  # fmt: skip
        return runs

    def decode(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
        common: PrefixResults,
    ) -> None:
        device = q_THD.device
        assert len(plan.kv_len_R) * shares <= COUNTERS, (len(plan.kv_len_R), shares)
        most = max(1, num_sms(device) * streams.per_sm // shares)
        has_prefixes = common.joins is not None
        key = ("runs", most, blocks * block_tokens, streams, most_queries, has_prefixes)
        runs, is_new = lists.get(plan, key, decode, lambda: make(plan, most, common.joins))
        partial = torch.empty(
            most * shares * 2 * columns * (depth + 2), dtype=torch.float32, device=device
        )
        options = launch(device)
        if is_new and "launch_pdl" in options:
            options["launch_pdl"] = False  # it reads the list before it waits
        decode_hopper_kernel[(shares, most)](
            cache_of(kv), typed(kv, problem.quantized)[1], q_THD, out_THD, lse_TH, runs,
            plan.query_start_R1, plan.kv_len_R, common.joins, plan.block_table_RB, partial,
            common.partial, counters(device), q_THD.stride(0), q_THD.stride(1),
            problem.heads * depth, plan.block_table_RB.stride(0),
            problem.scale * 1.4426950408889634, KV_HEADS=kv_heads, HEADS=heads, GROUP=group,
            QUERIES=most_queries, Q=columns, BLOCK_TOKENS=block_tokens, BLOCKS=blocks,
            STAGES=stages, LSE=lse_TH is not None, SHARED=has_prefixes, PREFIX_M=common.m,
            QUANTIZED=problem.quantized, num_warps=4, maxnreg=streams.registers, **options,
        )  # fmt: skip

    return decode
