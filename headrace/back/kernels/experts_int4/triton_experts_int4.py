"""Which kernels serve a mixture with weights of 4-bit numbers: on Hopper those that stream the
chosen experts' weights (triton_grouped_int4.py), on other GPUs and for what those do not know the
tiles of triton_tiles.py.

Which is taken depends on the step's sizes alone, never on where tokens go, so a step can be
recorded. T tokens, P pairs of a token and a slot, X experts, E width, I inner size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from headrace.back.kernels.experts.op import OAI_ALPHA, SWIGLU_OAI, Experts, ExpertsProblem
from headrace.back.kernels.experts.triton_dispatch import combined, dispatched
from headrace.back.kernels.experts.triton_experts import KNOWN, MAX_EXPERTS, check_arguments
from headrace.back.kernels.experts_int4 import triton_tiles
from headrace.back.kernels.experts_int4.layout import Int4Experts, padded
from headrace.back.kernels.experts_int4.op import ExpertsInt4Problem, sample_of
from headrace.back.kernels.linear_int4.layout import BLOCK, GROUPS, ROWS, Int4Weight, block_groups
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.room import shared_bytes
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    capability,
    counters,
    interpreted,
    launch,
    num_sms,
    unsupported,
)

log = logging.getLogger(__name__)

UNIT = 16
"""Inputs of a matrix are a multiple of it."""
TILES_ROWS = (16, 64)
"""Rows of a tile of triton_tiles.py: where experts have few on average, and else."""


@dataclass(frozen=True, kw_only=True)
class GroupedPlan:
    """m: rows of a tile; up to `mean` rows of an expert on average (None: any number). stages:
    blocks on their way, per_sm: programs of a multiprocessor, of the first GEMM and the second.
    `pair`: the second takes two tiles of the weight at once."""

    m: int
    mean: int | None
    stages: tuple[int, int]
    per_sm: tuple[int, int]
    pair: bool = True


PLANS = (
    GroupedPlan(m=8, mean=4, stages=(2, 3), per_sm=(6, 6), pair=False),
    GroupedPlan(m=16, mean=10, stages=(3, 4), per_sm=(4, 4), pair=False),
    GroupedPlan(m=32, mean=20, stages=(3, 3), per_sm=(3, 2), pair=False),
    GroupedPlan(m=64, mean=None, stages=(3, 4), per_sm=(2, 2), pair=False),
)
"""Stages and programs of up to four rows an expert as measured (benchmarks.lab.few_tokens: 195 us a
layer of gpt-oss-20b at 32 tokens, 224 by 3, 4 and 4, 4), of more as of dense layers
(linear_int4/triton_linear_int4.py), rows as of experts of bfloat16 (experts/triton_hopper.py)."""


def plan_for(problem: ExpertsProblem, num_tokens: int) -> GroupedPlan:
    """The plan of a step of so many tokens."""
    mean = num_tokens * problem.slots / problem.experts
    return next(plan for plan in PLANS if plan.mean is None or mean <= plan.mean)


def bind(
    problem: ExpertsInt4Problem,
    experts: Int4Experts,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
    *,
    always: GroupedPlan | None = None,
) -> Experts:
    """The kernels for one layer. `always`: those of Hopper by this plan, whatever the step."""
    mixture = problem.mixture
    streamed = always is not None or streams(problem)
    up = _Grouped(mixture, experts.up, up_bias_XI, results=mixture.inner, is_gated=True)
    down = _Grouped(mixture, experts.down, down_bias_XE, results=mixture.width, is_gated=False)

    def run(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_arguments(mixture, x_TE, expert_TK, weight_TK)
        plan = always or plan_for(mixture, len(x_TE))
        m = plan.m
        if not streamed:
            m = TILES_ROWS[expert_TK.numel() > TILES_ROWS[0] * mixture.experts]
        dispatch = dispatched(x_TE, expert_TK, experts=mixture.experts, m=m, absent=mixture.absent)
        rows_NE = dispatch.rows_NE
        inner_NI = x_TE.new_empty((len(rows_NE), mixture.inner))
        for gemm, rows_in, rows_out in ((up, rows_NE, inner_NI), (down, inner_NI, rows_NE)):
            if streamed:
                gemm.stream(plan, rows_in, dispatch.tiles, rows_out)
            else:
                gemm.tiles(m, rows_in, dispatch.tiles, rows_out)
        return combined(
            rows_NE, weight_TK, dispatch.places_P, x_TE, residual_TE, absent=mixture.absent
        )

    return run


class _Grouped:
    """One of the two grouped GEMMs, with what comes after it."""

    def __init__(
        self,
        problem: ExpertsProblem,
        weight: Int4Weight,
        bias_XO: torch.Tensor | None,
        *,
        results: int,
        is_gated: bool,
    ) -> None:
        self._problem, self._weight, self._bias_XO = problem, weight, bias_XO
        self._results, self._is_gated = results, is_gated
        self._words: object = None

    def tiles(self, m: int, x_NI: torch.Tensor, tiles: torch.Tensor, y_NO: torch.Tensor) -> None:
        """On any GPU."""
        triton_tiles.multiply(
            self._problem, x_NI, self._weight, self._bias_XO, tiles, y_NO, m=m,
            is_gated=self._is_gated,
        )  # fmt: skip

    def stream(
        self, plan: GroupedPlan, x_NI: torch.Tensor, tiles: torch.Tensor, y_NO: torch.Tensor
    ) -> None:
        """On Hopper."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from headrace.back.kernels.experts_int4.triton_grouped_int4 import (
            grouped_stream_int4_kernel,
        )

        weight, device, second = self._weight, x_NI.device, not self._is_gated
        if self._words is None:
            layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.int32)
            self._words = TensorDescriptor.from_tensor(
                weight.words_NBW.view(-1, 32), [32, 32], layout
            )
        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x_NI.dtype]
        x_layout = gl.NVMMASharedLayout.get_default_for([plan.m, BLOCK], element)
        x = TensorDescriptor.from_tensor(x_NI, [plan.m, BLOCK], x_layout)
        matrix_tiles = padded(self._results) // ROWS
        pair = 2 if self._is_gated or (plan.pair and matrix_tiles % 2 == 0) else 1
        most_items = (
            len(x_NI) // plan.m * (matrix_tiles if self._is_gated else matrix_tiles // pair)
        )
        is_split = most_items <= COUNTERS and plan.mean is not None
        programs = plan.per_sm[second] * num_sms(device)
        sums = programs * 2 * pair * ROWS * plan.m if is_split else 1
        partial_sums = torch.empty(sums, dtype=torch.float32, device=device)
        grouped_stream_int4_kernel[(programs,)](
            self._words, weight.scales_NBSR, x, self._bias_XO, tiles, y_NO, partial_sums,
            counters(device), self._problem.clamp, OAI_ALPHA, RESULTS=self._results,
            STEPS=weight.words_NBW.shape[1], TILES=matrix_tiles, STAGES=plan.stages[second],
            PAIR=pair, GROUPS=block_groups(weight.group), WHOLE=weight.group is None,
            MINIMA=weight.minima, FLOATS=weight.floats, BIAS=self._bias_XO is not None,
            GATED=self._is_gated, CLAMP=self._problem.clamp > 0,
            OAI=self._problem.activation == SWIGLU_OAI, SPLIT=is_split, num_warps=4,
            **launch(device),
        )  # fmt: skip


def streams(problem: ExpertsInt4Problem) -> bool:
    """Whether the kernels of Hopper serve here."""
    if problem in _skipped or problem.device != "cuda" or interpreted():
        return False
    if torch.version.hip is not None or capability() != (9, 0):
        return False
    return unfit_sizes(problem) is None and most_shared_bytes() <= shared_bytes()


def most_shared_bytes() -> int:
    """Shared memory of the largest program."""
    return max(
        stages * ((2 - second) * ROWS * BLOCK // 2 + plan.m * BLOCK * 2) + 1024
        for plan in PLANS
        for second, stages in enumerate(plan.stages)
    )


def unfit_sizes(problem: ExpertsInt4Problem) -> str | None:
    """Why these kernels do not serve a mixture on Hopper, if so."""
    mixture = problem.mixture
    if mixture.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {mixture.dtype}"
    if problem.form.floats and mixture.dtype is not torch.bfloat16:
        return "multiplies e2m1 numbers in bfloat16"
    if mixture.activation not in ("silu", SWIGLU_OAI):
        return f"gates by silu, or as gpt-oss, not by {mixture.activation}"
    if min(mixture.width, mixture.inner) <= BLOCK:
        return f"takes more than {BLOCK} inputs"
    return None


_skipped: dict[ExpertsInt4Problem, str] = {}
"""What goes without the kernels of Hopper in this process: a self-check of theirs failed."""


def plans(problem: ExpertsInt4Problem) -> list[PlanCheck]:
    """Each plan on the mixture's own sizes; tiles take the place of streams where one fails."""

    def skip_streams(reason: str) -> None:
        log.warning("%s goes without the kernels of Hopper: %s", problem, reason)
        _skipped[problem] = reason

    def check(name: str, tokens: int, bind: Callable[..., Experts], *, may_skip: bool) -> PlanCheck:
        skip = skip_streams if may_skip else None
        return PlanCheck(
            name=name, sample=partial(sample_of, problem, (tokens,)), bind=bind, skip=skip
        )

    if problem.device == "cuda" and (problem in _skipped or not streams(problem)):
        return [check(f"tiles of {m}", m + 3, bind, may_skip=False) for m in TILES_ROWS]
    return [
        check(f"stream {plan.m}", plan.m + 3, partial(bind, always=plan), may_skip=True)
        for plan in PLANS
    ]


def _supports(problem: ExpertsInt4Problem) -> str | None:
    mixture, form = problem.mixture, problem.form
    if mixture.beside:
        return "adds nothing beside"
    if mixture.experts > MAX_EXPERTS:
        return f"knows {MAX_EXPERTS} experts at most"
    for inputs in (mixture.width, mixture.inner):
        if inputs % UNIT:
            return f"{inputs} inputs are no multiple of {UNIT}"
    if form.group not in (None, *GROUPS):
        return f"scales of {', '.join(map(str, GROUPS))} inputs or of all, not of {form.group}"
    if mixture.activation not in KNOWN:
        return f"does not know {mixture.activation}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=plans)
