"""Paged attention in Triton: a kernel for rows with few queries (triton_decode.py) and one for the
others (triton_prefill.py); a step whose rows have one query each launches the first alone. On
Hopper a kernel of its own takes the place of the second (hopper.py), and another the rows with one
query from the first (hopper_decode.py).

Launches depend on the sizes of the tensors and on `plan.max_query_len` only, so a captured graph
serves every step of its shape; lengths are read on the device. Padding rows have no query tokens;
padding tokens are left uninitialised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from headrace.back.kernels.attention import cascade, hopper, hopper_decode, triton_plans
from headrace.back.kernels.attention.op import AttentionFunction, AttentionProblem, Plan, check_lse
from headrace.back.kernels.attention.triton_decode import (
    SPLIT_FIELDS,
    decode_kernel,
    splits_kernel,
)
from headrace.back.kernels.attention.triton_lists import (
    Launch,
    Tiles,
    fitted,
    lists,
    numbers,
    row_bucket,
)
from headrace.back.kernels.attention.triton_narrow import Turned, forms_of, token_width
from headrace.back.kernels.attention.triton_prefill import prefill_kernel
from headrace.back.kernels.kv_write.quantized import typed
from headrace.back.kernels.kv_write.triton_narrow_write import NARROW
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.room import LARGEST, shared_bytes
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    num_sms,
    power_of_two,
    unsupported,
    unsupported_quantization,
)

MAX_HEAD_DIM = 256
PROGRAMS_PER_SM = 2
"""Splits the decode kernel cuts the cache into, per multiprocessor; half as many for few rows, of
large tiles."""
MIN_SPLIT_TOKENS, MIN_SPLIT_TOKENS_ALONE = 256, 64
"""Positions of a split at least; of a row that is alone fewer, or most of the device would have
nothing to do."""
FEW_ROWS = 16
MAX_DECODE_QUERIES = 16
"""Queries of a row up to which a step of such rows alone is the decode kernel's."""
MAX_DECODE_PAIRS = 128
"""Query-head pairs of its tiles at most."""
DECODE_TILES = (
    (1, 64, 4, 3),
    (FEW_ROWS, 128, 4, 5),
    (47, 128, 4, 3),
    (256, 64, 2, 3),
    (1 << 30, 64, 4, 5),
)
"""Up to so many rows: positions of a tile, warps, stages. Measured on an H200
(benchmarks/h200/kernels.md): a few programs must keep much in flight each, many are better small
and beside each other."""


DecodeLaunch = Callable[
    [torch.Tensor, torch.Tensor, Plan, torch.Tensor, torch.Tensor | None, Tiles | None], None
]
"""f(q_THD, kv, plan, out_THD, lse_TH, tiles of a step of few queries a row)"""
HeadBiases = tuple[torch.Tensor | None, torch.Tensor | None]
"""Sinks and slopes [H]."""


def decode_tiles(problem: AttentionProblem, rows: int = 1, queries: int = 1) -> Tiles:
    """Those of `_decode_tiles` that fit."""
    return fitted(_decode_tiles(problem, rows, queries), problem)


def few_queries_tiles(problem: AttentionProblem, plan: Plan) -> Tiles | None:
    """The decode kernel's for a step whose rows have several queries each, but all of them few, as
    when drafts are verified; None if there are other rows, or if a tile would not hold a row's."""
    group, rows = problem.heads // problem.kv_heads, len(plan.kv_len_R)
    if not 1 < plan.max_query_len <= MAX_DECODE_QUERIES:
        return None
    if group * plan.max_query_len > MAX_DECODE_PAIRS:
        return None
    tiles = decode_tiles(problem, rows, plan.max_query_len)
    return tiles if tiles.m // group >= plan.max_query_len else None


def decode_name(tiles: Tiles) -> str:
    """What the self-check calls the decode kernel with these tiles."""
    return (
        f"decode in tiles of {tiles.m} x {tiles.n}, {tiles.num_warps} warps and"
        f" {tiles.num_stages} stages"
    )


def tiles_for(problem: AttentionProblem, rows: int, without: frozenset[str]) -> tuple[Tiles, bool]:
    """The decode kernel's, and whether they are the smallest, in the place of tiles that failed."""
    tiles = decode_tiles(problem, rows)
    if decode_name(tiles) not in without:
        return tiles, False
    return replace(tiles, n=16, num_warps=4, num_stages=1), True


def prefill_tiles(problem: AttentionProblem) -> Tiles:
    """Those of `_prefill_tiles` that fit."""
    return fitted(_prefill_tiles(problem), problem)


def _decode_tiles(problem: AttentionProblem, rows: int, queries: int) -> Tiles:
    """The decode kernel's for a step of so many rows; M holds so many queries of all heads that
    share a KV head."""
    group = problem.heads // problem.kv_heads
    m = power_of_two(group * queries, least=16)
    if problem.dtype is torch.float32 or problem.head_dim > 128:
        return Tiles(m=m, n=32, num_warps=4 if m <= 64 else 8, num_stages=2)
    if problem.quantized in NARROW:
        return Tiles(m=m, n=64, num_warps=4 if m <= 64 else 8, num_stages=2)
    if m > power_of_two(group, least=16):
        return Tiles(m=m, n=64, num_warps=4 if m <= 64 else 8, num_stages=3)
    if problem.quantized is not None or shared_bytes() < LARGEST:
        return Tiles(m=m, n=128, num_warps=4, num_stages=3)
    n, num_warps, num_stages = next(tiles[1:] for tiles in DECODE_TILES if rows <= tiles[0])
    return Tiles(m=m, n=n, num_warps=num_warps, num_stages=num_stages)


def _prefill_tiles(problem: AttentionProblem) -> Tiles:
    """The prefill kernel's."""
    least = power_of_two(problem.heads // problem.kv_heads, least=16)
    if problem.dtype is torch.float32:
        return Tiles(m=max(least, 32), n=32, num_warps=4, num_stages=1)
    if problem.head_dim > 128 or problem.quantized in NARROW:
        return Tiles(m=max(least, 128), n=64, num_warps=8, num_stages=2)
    return Tiles(m=max(least, 128), n=128, num_warps=8, num_stages=3)


def bind(
    problem: AttentionProblem, sinks_H: torch.Tensor | None = None, *, short_tokens: int | None = None
) -> AttentionFunction:  # fmt: skip
    """The kernels for one layer's heads, without the plans that have failed. `short_tokens`: see
    hopper.tiles_for."""
    without = triton_plans.skipped(problem)
    assert (sinks_H is not None) == problem.sinks, problem
    group = problem.heads // problem.kv_heads
    shared: dict[str, Any] = {
        **{"GROUP": group, "HEAD_DIM": problem.head_dim},
        "D": power_of_two(problem.head_dim, least=16),
        "BLOCK_TOKENS": problem.block_tokens,
        "WINDOW": problem.reach,
        "SOFTCAP": problem.softcap is not None,
        **forms_of(problem),
        "SINKS": problem.sinks,
        "ALIBI": bool(problem.slopes),
        "CAUSAL": problem.causal,
    }
    cached = torch.int8 if problem.quantized else problem.dtype
    width = token_width(problem)
    turned = Turned(problem.quantized, problem.head_dim, problem.dtype)
    biases = sinks_H, problem.slopes_tensor()
    decode = _bind_decode(problem, shared, biases, without)
    prefill = _bind_prefill(problem, shared, biases)
    prefill_hopper: Launch | None = None
    if triton_plans.PREFILL_TMA not in without and hopper.unfit(problem) is None:
        least = decode_tiles(problem).m // group + 1
        prefill_hopper = hopper.bind_prefill(problem, sinks_H, least, short_tokens)
    with_few = triton_plans.FEW_QUERIES not in without

    def attention(
        q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan, lse_TH: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert q_THD.dtype == problem.dtype and kv.dtype == cached, (q_THD.dtype, kv.dtype)
        assert kv.stride()[3:] == (width, 1) and q_THD.stride(2) == 1, (kv.stride(),)
        assert plan.block_table_RB.stride(1) == 1 or plan.block_table_RB.shape[1] == 1
        if lse_TH is not None:
            check_lse(lse_TH, q_THD)
        q_THD = turned.queries(q_THD)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        few = few_queries_tiles(problem, plan) if with_few else None
        decode(q_THD, kv, plan, out_THD, lse_TH, few)
        if plan.max_query_len > 1 and few is None:
            run = prefill_hopper if prefill_hopper is not None and kv.is_contiguous() else prefill
            run(q_THD, kv, plan, out_THD, lse_TH)
        return turned.results(out_THD)

    return attention


def _bind_decode(
    problem: AttentionProblem,
    shared: dict[str, Any],
    biases: HeadBiases,
    without: frozenset[str],
) -> DecodeLaunch:
    kv_heads = problem.kv_heads
    group, depth = problem.heads // kv_heads, power_of_two(problem.head_dim, least=16)

    prefix = cascade.bind_prefix(problem, shared, prefill_tiles(problem))
    streams = hopper_decode.bind_streams(problem, without)
    with_prefix = triton_plans.PREFIX not in without

    def make(
        plan: Plan, most: int, wanted: int, joins: torch.Tensor | None, sizes: dict[str, int]
    ) -> torch.Tensor:
        num_rows, device = len(plan.kv_len_R), plan.kv_len_R.device
        splits = torch.empty(most * SPLIT_FIELDS, dtype=torch.int32, device=device)
        splits_kernel[(most,)](
            plan.query_start_R1, plan.kv_len_R, joins, splits, num_rows, wanted, **sizes,
            SHARED=joins is not None, ROWS=row_bucket(num_rows), num_warps=4, **launch(device),
        )  # fmt: skip
        return splits

    def decode(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
        few: Tiles | None,
    ) -> None:
        num_rows, device = len(plan.kv_len_R), q_THD.device
        shares = with_prefix and few is None and cascade.serves(problem, plan)
        common = prefix(q_THD, kv, plan) if shares else cascade.NONE
        streamed, stream = streams(plan, kv, few is not None)
        if stream is not None:
            stream(q_THD, kv, plan, out_THD, lse_TH, common)
            if plan.max_query_len <= streamed:
                return
        assert num_rows * kv_heads <= COUNTERS, (num_rows, kv_heads)
        tiles = few or tiles_for(problem, num_rows, without)[0]
        sizes = {
            "MAX_QUERIES": tiles.m // group,
            "MIN_QUERIES": streamed + 1,
            "N": tiles.n,
            "WINDOW": problem.reach,
            "CAUSAL": problem.causal,
            "MIN_SPLIT_TOKENS": MIN_SPLIT_TOKENS
            if num_rows > 1
            else min(MIN_SPLIT_TOKENS, MIN_SPLIT_TOKENS_ALONE),
        }
        per_sm = PROGRAMS_PER_SM // 2 if num_rows <= FEW_ROWS else PROGRAMS_PER_SM
        wanted = max(1, num_sms(device) * per_sm // kv_heads)
        most = num_rows + wanted
        key = (*sizes.values(), most, common.joins is not None)
        splits, is_new = lists.get(
            plan, key, decode, lambda: make(plan, most, wanted, common.joins, sizes)
        )
        partial = torch.empty(
            most * kv_heads * tiles.m * (depth + 2), dtype=torch.float32, device=device
        )
        merged = 1 if few is None else power_of_two(plan.max_query_len)
        merged_m = power_of_two(merged * group)
        options = launch(device)
        if is_new and "launch_pdl" in options:
            options["launch_pdl"] = False  # it reads the list before it waits
        decode_kernel[(kv_heads, most)](
            q_THD, *typed(kv, problem.quantized), *biases, out_THD, lse_TH, plan.block_table_RB,
            splits, partial, common.partial, counters(device), *numbers(problem, q_THD, kv, plan),
            KV_HEADS=kv_heads, MERGED=merged, MERGED_M=merged_m, M=tiles.m, N=tiles.n,
            COMBINED=max(2, min(16, 16 * 1024 // (merged_m * depth))),
            SHARED=common.joins is not None, PREFIX_M=common.m, LSE=lse_TH is not None, **shared,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
        )  # fmt: skip

    return decode


def _bind_prefill(problem: AttentionProblem, shared: dict[str, Any], biases: HeadBiases) -> Launch:
    tiles, kv_heads = prefill_tiles(problem), problem.kv_heads
    group = problem.heads // kv_heads
    few = decode_tiles(problem).m // group

    def prefill(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        num_rows = len(plan.kv_len_R)
        most = triton.cdiv(len(q_THD), tiles.m // group) + num_rows
        prefill_kernel[(kv_heads, most)](
            q_THD, *typed(kv, problem.quantized), *biases, out_THD, lse_TH,
            plan.query_start_R1, plan.kv_len_R, plan.block_table_RB, num_rows,
            *numbers(problem, q_THD, kv, plan), KV_HEADS=kv_heads, MIN_QUERIES=few + 1, M=tiles.m,
            N=tiles.n, ROWS=row_bucket(num_rows), LSE=lse_TH is not None, **shared,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **launch(q_THD.device),
        )  # fmt: skip

    return prefill


def _supports(problem: AttentionProblem) -> str | None:
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
    if problem.heads % problem.kv_heads:
        return f"{problem.heads} heads are no multiple of {problem.kv_heads} KV heads"
    if problem.bias_width or problem.late_length or problem.stripes:
        return "knows neither a position bias nor scores that grow, nor sparse blocks"
    return unsupported(problem.device, problem.dtype) or unsupported_quantization(
        problem.quantized, problem.head_dim
    )


CHECKED_ROWS = (
    *(1, hopper_decode.LEAST_ROWS - 1, hopper_decode.LEAST_ROWS, FEW_ROWS, 40),
    *(cascade.LEAST_ROWS, 200, 300),
)
"""Rows of the steps of decodes that plans are looked for in: all tiles and streams, and all sizes
of lists up to 1024 rows."""


def plans(problem: AttentionProblem) -> list[PlanCheck]:
    """Each plan that some step takes: decodes, few queries a row, prompts on Hopper; last prompts
    beside decodes by what is left."""
    without = triton_plans.skipped(problem)
    check = partial(triton_plans.check, problem, bind=bind)
    checks = _decode_checks(problem)
    checks += _few_checks(problem)
    if not hopper.unfit(problem) and triton_plans.PREFILL_TMA not in without:
        alone = triton_plans.prompts(problem, decodes=0)
        checks.append(check(triton_plans.PREFILL_TMA, alone))
        if hopper.tiles_for(problem, 1) != hopper.tiles_for(problem, 1, 0):
            long = partial(bind, short_tokens=0)
            checks.append(triton_plans.check(problem, triton_plans.PREFILL_TMA, alone, bind=long))
    mixed = triton_plans.prompts(problem, decodes=hopper_decode.LEAST_ROWS)
    return [*checks, check(triton_plans.PROMPTS, mixed, needed=True)]


def _decode_checks(problem: AttentionProblem) -> list[PlanCheck]:
    """Decodes by Hopper's kernel where it serves them, by the generic one elsewhere: with each of
    its tiles, and each size that the kernel of its list is compiled for. Where a step looks for
    shared prefixes it is checked with one, and if that fails, looked at again without: the kernels
    are others then."""
    check = partial(triton_plans.check, problem, bind=bind)
    checks: dict[tuple[str, int, bool], PlanCheck] = {}
    for rows in CHECKED_ROWS:
        name, is_last = _decode_plan(problem, rows)
        shares = _shares(problem, rows)
        key = (name, row_bucket(rows), shares)
        if shares:
            step = triton_plans.decodes(rows, prefix_tokens=triton_plans.SHARED_TOKENS)
            checks.setdefault(key, check(triton_plans.PREFIX, step))
        else:
            checks.setdefault(key, check(name, triton_plans.decodes(rows), needed=is_last))
    return list(checks.values())


def _few_checks(problem: AttentionProblem) -> list[PlanCheck]:
    """Few queries a row: as many as verify drafts, in powers of two, by the generic kernel and by
    Hopper's."""
    without = triton_plans.skipped(problem)
    check = partial(triton_plans.check, problem, bind=bind)
    sizes = [2**i for i in range(1, 5) if 2**i <= power_of_two(problem.verify_queries)]
    checks = []
    if triton_plans.FEW_QUERIES not in without:
        steps = [triton_plans.few_queries(problem, queries=most) for most in sizes or [4]]
        checks = [check(triton_plans.FEW_QUERIES, step) for step in steps]
    if hopper_decode.unfit(problem):
        return checks
    for rows in (hopper_decode.LEAST_ROWS, hopper_decode.MOST_VERIFYING_ROWS):
        for queries in sizes:
            name = hopper_decode.plan_name(problem, rows, queries)
            padded = hopper_decode.verified_queries(problem, rows=rows, queries=queries)
            if padded is not None and name not in without:
                step = triton_plans.few_queries(problem, rows=rows, queries=queries)
                checks.append(check(name, step))
    return checks


def _decode_plan(problem: AttentionProblem, rows: int) -> tuple[str, bool]:
    """The plan of a step of so many decodes, and whether nothing takes its place."""
    without = triton_plans.skipped(problem)
    if rows >= hopper_decode.LEAST_ROWS and not hopper_decode.unfit(problem):
        name = hopper_decode.plan_name(problem, rows)
        if name not in without:
            return name, False
    tiles, is_last = tiles_for(problem, rows, without)
    return decode_name(tiles), is_last


def _shares(problem: AttentionProblem, rows: int) -> bool:
    """Whether a step of so many decodes looks for shared prefixes, if its tables are wide."""
    if not problem.causal or problem.reach or problem.slopes or rows < cascade.LEAST_ROWS:
        return False
    return triton_plans.PREFIX not in triton_plans.skipped(problem)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=plans)
