"""The experts of a mixture on Hopper, by the number of rows that experts have: which kernels run,
with which tiles.

    few      one or two tokens: no sorting, no tensor cores (triton_few.py)
    stream   experts with few rows: bound by reading the chosen experts' weights once
             (triton_grouped_stream.py)
    wide     experts with many: bound by the tensor cores (triton_grouped_wide.py)

Which is taken depends on the step's sizes alone, never on where tokens go, so a step can be
recorded. P pairs of a token and a slot, X experts, E width, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from headrace.back.kernels.experts.op import Experts, ExpertsProblem, with_absent
from headrace.back.kernels.op import Kernel, PlanCheck, Sample, random_tensor, sample_generator
from headrace.back.kernels.triton.wrap import capability, interpreted, launch, num_sms, unsupported

FEW_TOKENS = 2
"""Measured on an H200 with 128 experts of 2048 x 768 and 8 slots, uniform routing: 1 and 2 tokens
23 and 41 us by "few", 30 and 48 by "stream"; 4 tokens 75 and 77."""
STREAM_ROWS = {10: 16, 20: 32, 48: 64}
"""Rows of a tile by the pairs that an expert has on average, at most. Uniform routing then seldom
needs two tiles of an expert, which would read its weights twice: with 8 pairs 303 us by tiles of 16
rows, 313 by 32; with 16 341, 317 and 331 (64); with 32 379 (32), 344 (64) and 391 (wide); with 64
410 (64) and 401 (wide)."""
WIDE_ROWS = 128
K = {"stream": 128, "wide": 64}
"""Inputs of a step."""
STREAM_BYTES = 200 << 10
"""Of shared memory for steps on their way."""
WIDE_STAGES = 4
PART = 128
"""Weight rows that the TMA unit brings to a tile of "wide" at once."""
FEW = {"up": (4, 512, 2), "down": (2, 512, 4)}
"""Outputs of a program, inputs of a step, warps."""


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan:
    """A regime, and the rows of its tiles (0: there are none)."""

    regime: str
    m: int = 0


PLANS = (
    ExpertsPlan(regime="few"),
    *(ExpertsPlan(regime="stream", m=m) for m in STREAM_ROWS.values()),
    ExpertsPlan(regime="wide", m=WIDE_ROWS),
)


def plan_for(problem: ExpertsProblem, num_tokens: int) -> ExpertsPlan:
    """The plan of a step of so many tokens."""
    if num_tokens <= FEW_TOKENS:
        return PLANS[0]
    mean = num_tokens * problem.slots / problem.experts
    for most, m in STREAM_ROWS.items():
        if mean <= most:
            return ExpertsPlan(regime="stream", m=m)
    return PLANS[-1]


def bind(
    problem: ExpertsProblem,
    up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
    *,
    always: ExpertsPlan | None = None,
) -> Experts:
    """The kernels for one layer; keeps the weights. `always`: by this plan, whatever the step."""
    assert up_bias_XI is None and down_bias_XE is None
    up_XIE, down_XEI = up_XIE.contiguous(), down_XEI.contiguous()
    few = bind_few(problem, up_XIE, down_XEI)
    up = Grouped(up_XIE.flatten(0, 1), results=problem.inner, is_gated=True)
    down = Grouped(down_XEI.flatten(0, 1), results=problem.width, is_gated=False)

    def experts(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from headrace.back.kernels.experts.triton_dispatch import combined, dispatched
        from headrace.back.kernels.experts.triton_experts import check_arguments

        check_arguments(problem, x_TE, expert_TK, weight_TK)
        plan = always or plan_for(problem, len(x_TE))
        if plan.regime == "few":
            return few(x_TE, expert_TK, weight_TK, residual_TE)
        dispatch = dispatched(
            x_TE, expert_TK, experts=problem.experts, m=plan.m, absent=problem.absent
        )
        rows_NE = dispatch.rows_NE
        inner_NI = x_TE.new_empty((len(rows_NE), problem.inner))
        up.run(plan, rows_NE, dispatch.tiles, inner_NI)
        down.run(plan, inner_NI, dispatch.tiles, rows_NE)  # which are read no more
        return combined(
            rows_NE, weight_TK, dispatch.places_P, x_TE, residual_TE, absent=problem.absent
        )

    return experts


def bind_few(problem: ExpertsProblem, up_XIE: torch.Tensor, down_XEI: torch.Tensor) -> Experts:
    """The regime of few tokens alone, which any GPU could run."""
    return partial(_run_few, problem, up_XIE, down_XEI)


def _run_few(
    problem: ExpertsProblem,
    up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    x_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    residual_TE: torch.Tensor | None = None,
) -> torch.Tensor:
    from headrace.back.kernels.experts.triton_dispatch import result_for
    from headrace.back.kernels.experts.triton_experts import activation_constants
    from headrace.back.kernels.experts.triton_few import few_down_kernel, few_up_kernel

    (num_tokens, slots), common = expert_TK.shape, launch(x_TE.device)
    inner_PI = x_TE.new_empty((num_tokens * slots, problem.inner))
    y_TE = result_for(x_TE, residual_TE)
    sizes = {
        "SLOTS": slots,
        "E": problem.width,
        "I": problem.inner,
        "BIAS": False,
        "ABSENT": problem.absent,
    }
    n, c, warps = FEW["up"]
    few_up_kernel[(triton.cdiv(problem.inner, n), num_tokens * slots)](
        x_TE, up_XIE, None, expert_TK, inner_PI, 0.0, 1.0, N=n, C=c, num_warps=warps,
        **activation_constants(problem), **sizes, **common,
    )  # fmt: skip
    n, c, warps = FEW["down"]
    few_down_kernel[(triton.cdiv(problem.width, n), num_tokens)](
        inner_PI, down_XEI, None, expert_TK, weight_TK, y_TE, y_TE.stride(0), N=n, C=c,
        ADD=residual_TE is not None, num_warps=warps, **sizes, **common,
    )  # fmt: skip
    return y_TE


class Grouped:
    """y = x W^T of each tile's expert; gated: silu(x G^T) * (x U^T)."""

    def __init__(self, weight_OI: torch.Tensor, *, results: int, is_gated: bool) -> None:
        self._weight_OI, self._results, self._is_gated = weight_OI, results, is_gated
        self._boxes: dict[tuple[int, int], Any] = {}

    def run(
        self, plan: ExpertsPlan, x_NI: torch.Tensor, tiles: torch.Tensor, y_NO: torch.Tensor
    ) -> None:
        """Launches the plan's kernel."""
        launch_of = {"stream": self._stream, "wide": self._wide}[plan.regime]
        launch_of(plan.m, x_NI, tiles, y_NO)

    def _constants(self, k: int, stages: int) -> dict[str, int | bool]:
        steps = triton.cdiv(self._weight_OI.shape[1], k)
        return {
            "RESULTS": self._results, "STEPS": steps, "STAGES": stages, "GATED": self._is_gated,
        }  # fmt: skip

    def _stream(self, m: int, x_NI: torch.Tensor, tiles: torch.Tensor, y_NO: torch.Tensor) -> None:
        from headrace.back.kernels.experts.triton_grouped_stream import (
            ROWS,
            grouped_stream_kernel,
        )

        k = K["stream"]
        stages = STREAM_BYTES // ((2 * ROWS.value + m) * k * 2)
        grouped_stream_kernel[(num_sms(x_NI.device),)](
            self._weight(ROWS.value, k), _described(x_NI, m, k), tiles, y_NO,
            **self._constants(k, stages), num_warps=4, **launch(x_NI.device),
        )  # fmt: skip

    def _wide(self, m: int, x_NI: torch.Tensor, tiles: torch.Tensor, y_NO: torch.Tensor) -> None:
        from headrace.back.kernels.experts.triton_grouped_wide import grouped_wide_kernel

        k = K["wide"]
        grouped_wide_kernel[(num_sms(x_NI.device),)](
            _described(x_NI, m // 2, k), self._weight(PART, k), _described(y_NO, m // 2, PART), tiles,
            **self._constants(k, WIDE_STAGES), num_warps=4, **launch(x_NI.device),
        )  # fmt: skip

    def _weight(self, rows: int, k: int) -> Any:
        key = rows, k
        if key not in self._boxes:
            self._boxes[key] = _described(self._weight_OI, rows, k)
        return self._boxes[key]


def _described(tensor: torch.Tensor, *box: int) -> Any:
    """The TMA unit's descriptor of a matrix in boxes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(box), element)
    return TensorDescriptor(tensor, list(tensor.shape), [tensor.stride(0), 1], list(box), layout)


def sample_of(problem: ExpertsProblem, num_tokens: int) -> Sample:
    """The problem's own sizes with three experts, one of which nobody chose."""
    few = replace(problem, experts=3, slots=min(2, problem.slots))
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    up = random_tensor(3, 2 * few.inner, few.width, **new) * few.width**-0.5
    down = random_tensor(3, few.width, few.inner, **new) * few.inner**-0.5
    x = random_tensor(num_tokens, few.width, **new)
    order = torch.rand(num_tokens, 2, generator=generator).argsort(1)[:, : few.slots] * 2
    expert = with_absent(problem, order.to(device=problem.device, dtype=torch.int32))
    weight = torch.rand(num_tokens, few.slots, generator=generator).to(problem.device)
    residual = (random_tensor(num_tokens, few.width, **new),) if problem.adds else ()
    return Sample(problem=few, weights=(up, down), arguments=(x, expert, weight, *residual))


def _plans(problem: ExpertsProblem) -> Sequence[PlanCheck]:
    def check(plan: ExpertsPlan) -> PlanCheck:
        sample: Callable[[], Sample] = partial(sample_of, problem, plan.m + 2)
        name = f"{plan.regime} {plan.m}" if plan.m else plan.regime
        return PlanCheck(name=name, sample=sample, bind=partial(bind, always=plan))

    return [check(plan) for plan in PLANS]


def _supports(problem: ExpertsProblem) -> str | None:
    if interpreted() or problem.device != "cuda" or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if capability() != (9, 0):
        return "asks for the TMA unit and the matrix instructions of compute capability 9.0"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {problem.dtype}"
    if problem.beside:
        return "adds nothing beside"
    if problem.activation != "silu" or problem.bias or problem.clamp:
        return "gates by silu, without biases or bounds"
    least = max(*K.values(), PART)  # boxes of the TMA unit lie within what they are cut from
    if problem.width % 8 or problem.inner % 8 or min(problem.width, problem.inner) < least:
        return f"{problem.width} x {problem.inner} is no multiple of 8, or below {least}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="hopper", supports=_supports, bind=bind, plans=_plans)
