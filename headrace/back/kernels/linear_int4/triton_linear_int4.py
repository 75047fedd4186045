"""Which kernel serves how many tokens of a weight of 4-bit integers: on Hopper one token, with the
norm, and up to LIBRARY_FROM those that stream the weight (triton_stream_int4.py), on other GPUs and
for what those do not know the tiles of triton_tiles_int4.py; more the library's GEMM, or that with
the activation inside (linear/triton_wide.py), with the weight dequantized before it; or, if tokens
become int8, the GEMM of integers, with the weight unpacked before it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial

import torch

from headrace.back.kernels.fused_linear.around import LayerGemm, activation_problem
from headrace.back.kernels.fused_linear.triton_around import (
    after_norm,
    bind_int8_rows,
    bind_norm_before,
    refusal_of,
    result_for,
)
from headrace.back.kernels.linear.dequantized import bind_dequantized, room_for
from headrace.back.kernels.linear.table import padded
from headrace.back.kernels.linear_int4 import stream, triton_tiles_int4
from headrace.back.kernels.linear_int4.layout import BLOCK, GROUPS, ROWS, Int4Weight, scales_of
from headrace.back.kernels.linear_int4.op import (
    CHECKED_ROWS,
    INT8_FROM,
    LinearInt4Problem,
    sample_of,
)
from headrace.back.kernels.linear_int4.stream import Int4Gemm, StreamPlan
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.room import shared_bytes

log = logging.getLogger(__name__)

LIBRARY_FROM = INT8_FROM
"""Tokens from which on the weight is dequantized as a whole (H200: 256 tokens stream in 252 us a
layer of Qwen3-8B, against 284 so)."""
MOST_TOKENS = 64
"""Of a program."""


PLANS: dict[int, tuple[StreamPlan, StreamPlan]] = {
    1: (
        StreamPlan(stages=3, per_sm=2, tokens=1, depth=4),
        StreamPlan(stages=3, per_sm=2, tokens=1, depth=2),
    ),
    8: (
        StreamPlan(stages=3, per_sm=2, tokens=8),
        StreamPlan(stages=3, per_sm=4, tokens=8),
    ),
    16: (
        StreamPlan(stages=4, per_sm=3, tokens=16, pair=False),
        StreamPlan(stages=3, per_sm=4, tokens=16),
    ),
    32: (
        StreamPlan(stages=3, per_sm=2, tokens=32, pair=False),
        StreamPlan(stages=3, per_sm=3, tokens=32),
    ),
    64: (
        StreamPlan(stages=4, per_sm=2, tokens=64, pair=False),
        StreamPlan(stages=3, per_sm=2, tokens=64),
    ),
}
"""By the most tokens, without an activation and with one: the best over the layers of Qwen3-8B on
an H200 (benchmarks/h200/quantized.md)."""
MANY = StreamPlan(stages=3, per_sm=1, tokens=MOST_TOKENS)
ONE_IN_SMALL_GROUPS = StreamPlan(stages=3, per_sm=4, tokens=1)
"""Of one token by streams (benchmarks.lab.few_tokens, Q4_K: 26.6 us for gates and ups, 37.6 by two
programs of a multiprocessor)."""


BY_ROWS_IN_SMALL_GROUPS = (
    StreamPlan(stages=3, per_sm=2, tokens=1, depth=1, pair=False),
    StreamPlan(stages=3, per_sm=2, tokens=1, depth=1),
)
"""The same of integers by triton_rows_int4.py, without an activation and with one: two programs of
128 registers fit a multiprocessor. Taken once a device has shown that they are quicker."""
SMALL_GROUPS_BY_ROWS = False


def plan_of(tokens: int, *, gated: bool, group: int | None, by_rows: bool = True) -> StreamPlan:
    """The plan for a padded number of tokens of a weight with such groups; `by_rows`:
    triton_rows_int4.py knows its numbers."""
    if tokens == 1 and group not in (None, BLOCK):
        if SMALL_GROUPS_BY_ROWS and by_rows:
            return BY_ROWS_IN_SMALL_GROUPS[gated]
        return ONE_IN_SMALL_GROUPS
    for most, both in PLANS.items():
        if tokens <= most:
            return replace(both[gated], tokens=tokens)
    return MANY


def bind(
    problem: LinearInt4Problem,
    weight: Int4Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> LayerGemm:
    """The kernels for one weight. x is brought into its order before anything else."""
    order_I = weight.order_I
    if order_I is not None and norm_weight_I is not None:
        norm_weight_I = norm_weight_I.index_select(0, order_I)
    several = Int4Gemm(weight=weight, bias_O=bias_O, activation=problem.activation, add=problem.add)
    one = replace(several, norm_I=norm_weight_I, eps=problem.eps or 0.0)
    norm = bind_norm_before(problem, norm_weight_I)
    streamed = _streams(problem, several)
    act = None if problem.activation is None else activation_problem(problem)
    if problem.int8_rows:
        many = _int8_rows(problem, weight, bias_O, norm_weight_I)
    else:
        dequantized = bind_dequantized(
            weight, triton_tiles_int4.dequantize_into, bias_O, dtype=problem.dtype, activation=act,
            add=problem.add, wide=problem.wide,
        )  # fmt: skip
        many = after_norm(norm, dequantized)
    fused = norm is None or streamed

    @cache
    def launch_of(tokens: int) -> stream.Launch:
        gated = problem.activation is not None
        plan = plan_of(
            tokens, gated=gated, group=weight.group, by_rows=stream.known_by_rows(weight)
        )
        return stream.bind(one if tokens == 1 else several, plan)

    def tiles(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        triton_tiles_int4.multiply(
            x_TI, weight, bias_O, y_TY, activation=problem.activation or "", add=problem.add
        )

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = len(x_TI)
        if order_I is not None:
            x_TI = x_TI.index_select(1, order_I)
        if num_tokens >= LIBRARY_FROM:
            return many(x_TI, residual_TY)
        if norm is not None and (num_tokens > 1 or not fused):
            x_TI = norm(x_TI)
        y_TY = result_for(problem, x_TI, residual_TY)
        run = launch_of(padded(num_tokens)) if streamed else tiles
        run(x_TI, y_TY)
        return y_TY

    return linear


def _int8_rows(
    problem: LinearInt4Problem,
    weight: Int4Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> LayerGemm:
    room, scales_OG = room_for(weight, torch.int8), scales_of(weight)

    def unpacked() -> tuple[torch.Tensor, torch.Tensor]:
        values_OI = room.part(weight)
        triton_tiles_int4.dequantize_into(weight, values_OI)
        return values_OI, scales_OG

    return bind_int8_rows(problem, unpacked, weight.group, bias_O, norm_weight_I)


def _streams(problem: LinearInt4Problem, gemm: Int4Gemm) -> bool:
    if problem in _skipped or stream.unfit(gemm) is not None:
        return False
    weight = gemm.weight
    by_rows = stream.known_by_rows(weight)
    plan = plan_of(1, gated=bool(gemm.activation), group=weight.group, by_rows=by_rows)
    return stream.shared_bytes(gemm, plan) <= shared_bytes()


_skipped: dict[LinearInt4Problem, str] = {}
"""What goes without the kernels of Hopper in this process: a self-check of theirs failed."""


def plans(problem: LinearInt4Problem) -> list[PlanCheck]:
    """Each kernel on the whole shape; tiles take the place of streams where one of those fails."""

    def skip_streams(reason: str) -> None:
        log.warning("%s goes without the kernels of Hopper: %s", problem, reason)
        _skipped[problem] = reason

    streamed = problem.device == "cuda" and problem not in _skipped
    return [
        PlanCheck(
            name=f"{tokens} tokens",
            sample=partial(sample_of, problem, (tokens,)),
            bind=bind,
            skip=skip_streams if streamed and tokens < LIBRARY_FROM else None,
        )
        for tokens in (*CHECKED_ROWS, LIBRARY_FROM + 3)
    ]


def _supports(problem: LinearInt4Problem) -> str | None:
    reason = refusal_of(problem, GROUPS)
    if reason is not None:
        return reason
    if problem.activation is not None and problem.results % ROWS:
        return f"gates multiples of {ROWS} results, not {problem.results}"
    if problem.int8_rows and (problem.minima or problem.floats or problem.group == 16):
        return (
            "multiplies int8 tokens by integers without minima, of at least 32 that share a scale"
        )
    return None


KERNEL = Kernel(
    name="triton",
    supports=_supports,
    bind=bind,
    plans=plans,
    note=lambda problem: f"from {LIBRARY_FROM} tokens on dequantized before the GEMM",
)
