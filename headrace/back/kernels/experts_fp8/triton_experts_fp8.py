"""Which kernels serve a mixture with weights of e4m3 numbers, by the step's sizes alone:

    few      one token: weights as they are, no sorting (triton_few_fp8.py)
    stream   Hopper: persistent programs with the TMA unit (triton_stream_fp8.py)
    tiles    other GPUs (triton_tiles_fp8.py)

T tokens, P pairs of a token and a slot, X experts, E width, I inner size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton

from headrace.back.kernels.experts.op import OAI_ALPHA, SWIGLU_OAI, Experts, ExpertsProblem
from headrace.back.kernels.experts.triton_dispatch import combined, dispatched, result_for
from headrace.back.kernels.experts.triton_experts import (
    KNOWN,
    MAX_EXPERTS,
    activation_constants,
    check_arguments,
)
from headrace.back.kernels.experts_fp8 import triton_tiles_fp8
from headrace.back.kernels.experts_fp8.layout import GROUP, Fp8Experts
from headrace.back.kernels.experts_fp8.op import QUANTIZED_FROM, ExpertsFp8Problem, sample_of
from headrace.back.kernels.linear.scaled_rows import ScaledRows
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.wrap import (
    capability,
    interpreted,
    launch,
    power_of_two,
    unsupported,
)

log = logging.getLogger(__name__)

UNIT = 16
"""Inputs of a matrix are a multiple of it."""
ROWS = {10: 16, 40: 32}
"""Rows of a tile by the pairs that an expert has on average, at most. Measured on an H200 with 128
experts of 2048 x 768 and 8 slots, uniform routing: with 8 pairs 168 us by tiles of 16 rows, 179 by
32; with 16 188, 180 and 215 (64); with 32 253, 221 and 228; with 64 401, 304 and 295, 498 by tiles
of 128 rows. One token takes 20 us by "few", 23 by "stream", two 35 and 31."""
MOST_ROWS = 64
FEW = {"up": (2, 1024, 4), "down": (2, 512, 2)}
"""Outputs of a program, inputs of a step, warps. Alone they took 1.5 and 1 us less than (4, 1024,
4) and (8, 256, 4), of 20.2 (H200, one token of Qwen3-30B-A3B)."""


@dataclass(frozen=True, kw_only=True)
class Fp8Plan:
    """A regime, and the rows of its tiles (0: there are none)."""

    regime: str
    m: int = 0


def plan_for(problem: ExpertsFp8Problem, num_tokens: int, *, streamed: bool) -> Fp8Plan:
    """The plan of a step of so many tokens."""
    if num_tokens < QUANTIZED_FROM:
        return Fp8Plan(regime="few")
    mean = num_tokens * problem.mixture.slots / problem.mixture.experts
    m = next((m for most, m in ROWS.items() if mean <= most), MOST_ROWS)
    return Fp8Plan(regime="stream" if streamed else "tiles", m=m)


def all_plans(*, streamed: bool) -> list[Fp8Plan]:
    """Those that some number of tokens takes."""
    regime = "stream" if streamed else "tiles"
    several = [Fp8Plan(regime=regime, m=m) for m in (*ROWS.values(), MOST_ROWS)]
    return [Fp8Plan(regime="few"), *several]


def bind(
    problem: ExpertsFp8Problem,
    experts: Fp8Experts,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
    *,
    always: Fp8Plan | None = None,
) -> Experts:
    """The kernels for one layer. `always`: by this plan, whatever the step."""
    mixture, biases = problem.mixture, (up_bias_XI, down_bias_XE)
    streamed = streams(problem)

    def run(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_arguments(mixture, x_TE, expert_TK, weight_TK)
        plan = always or plan_for(problem, len(x_TE), streamed=streamed)
        if plan.regime == "few":
            return _few(mixture, experts, biases, x_TE, expert_TK, weight_TK, residual_TE)
        of_tokens, of_inner = experts.fixed
        dispatch = dispatched(
            x_TE, expert_TK, experts=mixture.experts, m=plan.m, group=GROUP, scale_1=of_tokens,
            absent=mixture.absent,
        )  # fmt: skip
        assert dispatch.scales_NG is not None
        rows = ScaledRows(dispatch.rows_NE, dispatch.scales_NG)
        multiply, tiles = _multiply_of(plan.regime), dispatch.tiles
        inner = multiply(
            mixture, rows, experts.up, up_bias_XI, tiles, m=plan.m, is_gated=True, scale_1=of_inner
        )
        rows = ScaledRows(*inner)
        out_NE, _ = multiply(
            mixture, rows, experts.down, down_bias_XE, tiles, m=plan.m, is_gated=False
        )
        return combined(
            out_NE, weight_TK, dispatch.places_P, x_TE, residual_TE, absent=mixture.absent
        )

    return run


def _multiply_of(regime: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The launch of a regime's grouped GEMMs."""
    if regime == "tiles":
        return triton_tiles_fp8.multiply
    from headrace.back.kernels.experts_fp8 import triton_stream_fp8

    return triton_stream_fp8.multiply


def _few(
    problem: ExpertsProblem,
    experts: Fp8Experts,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    x_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    residual_TE: torch.Tensor | None,
) -> torch.Tensor:
    from headrace.back.kernels.experts_fp8.triton_few_fp8 import (
        few_down_fp8_kernel,
        few_up_fp8_kernel,
    )

    (num_tokens, slots), common = expert_TK.shape, launch(x_TE.device)
    inner_PI = x_TE.new_empty((num_tokens * slots, problem.inner))
    y_TE = result_for(x_TE, residual_TE)
    facts = {
        "SLOTS": slots, "E": problem.width, "I": problem.inner,
        "GROUPED": experts.group is not None, "BIAS": problem.bias,
        "ABSENT": problem.absent, **common,
    }  # fmt: skip
    up_bias_XI, down_bias_XE = biases
    n, c, warps = FEW["up"]
    few_up_fp8_kernel[(triton.cdiv(problem.inner, n), num_tokens * slots)](
        x_TE, experts.up.values_XOI, experts.up.scales_XGO, up_bias_XI, expert_TK, inner_PI,
        problem.clamp, OAI_ALPHA, N=n, C=c, num_warps=warps, **activation_constants(problem),
        **facts,
    )  # fmt: skip
    n, c, warps = FEW["down"]
    few_down_fp8_kernel[(triton.cdiv(problem.width, n), num_tokens)](
        inner_PI, experts.down.values_XOI, experts.down.scales_XGO, down_bias_XE, expert_TK,
        weight_TK, y_TE, y_TE.stride(0), N=n, C=c,
        LINES=power_of_two(triton.cdiv(problem.inner, 128)), ADD=residual_TE is not None,
        num_warps=warps, **facts,
    )  # fmt: skip
    return y_TE


def streams(problem: ExpertsFp8Problem) -> bool:
    """Whether the kernels of Hopper serve here."""
    if problem in _skipped or problem.device != "cuda" or interpreted():
        return False
    if torch.version.hip is not None or capability() != (9, 0):
        return False
    return unfit_sizes(problem) is None


def unfit_sizes(problem: ExpertsFp8Problem) -> str | None:
    """Why these kernels do not serve a mixture on Hopper, if so."""
    if problem.mixture.activation not in ("silu", SWIGLU_OAI):
        return f"gates by silu, or as gpt-oss, not by {problem.mixture.activation}"
    return None


_skipped: dict[ExpertsFp8Problem, str] = {}
"""What goes without the kernels of Hopper in this process: a self-check of theirs failed."""


def plans(problem: ExpertsFp8Problem) -> list[PlanCheck]:
    """Each plan on the mixture's own sizes; tiles take the place of streams where one fails."""

    def skip_streams(reason: str) -> None:
        log.warning("%s goes without the kernels of Hopper: %s", problem, reason)
        _skipped[problem] = reason

    return [
        PlanCheck(
            name=f"{plan.regime} {plan.m}" if plan.m else plan.regime,
            sample=partial(sample_of, problem, (plan.m + QUANTIZED_FROM - 1,)),
            bind=partial(bind, always=plan),
            skip=skip_streams if plan.regime == "stream" else None,
        )
        for plan in all_plans(streamed=streams(problem))
    ]


def _supports(problem: ExpertsFp8Problem) -> str | None:
    mixture = problem.mixture
    if mixture.beside:
        return "adds nothing beside"
    if mixture.experts > MAX_EXPERTS:
        return f"knows {MAX_EXPERTS} experts at most"
    for inputs in (mixture.width, mixture.inner):
        if inputs % UNIT:
            return f"{inputs} inputs are no multiple of {UNIT}"
    if problem.group not in (None, GROUP):
        return f"scales of {GROUP} inputs or of all, not of {problem.group}"
    if mixture.activation not in KNOWN:
        return f"does not know {mixture.activation}"
    reason = unsupported(problem.device, problem.dtype)
    if reason is not None:
        return reason
    if torch.version.hip is not None:
        return "is for NVIDIA's GPUs"
    if not interpreted() and capability() < (8, 9):
        return "fp8 needs compute capability 8.9, not {}.{}".format(*capability())
    return None


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=plans)
