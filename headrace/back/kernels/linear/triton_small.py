"""Chooses and launches our kernels of GEMMs by table.py: triton_gemv.py, triton_gemv_bytes.py,
triton_skinny.py, triton_stream.py and triton_wide.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
import triton

from headrace.back.kernels.gated_act.triton_gated_act import ACTIVATIONS
from headrace.back.kernels.linear import gemv_bytes, stream, wide
from headrace.back.kernels.linear.table import (
    MAX_TOKENS,
    GemmPlan,
    padded,
    plan_for,
    shape_name,
    skip,
    source,
)
from headrace.back.kernels.linear.time_model import GemmDevice, gemm_device
from headrace.back.kernels.linear.triton_gemv import gemv_kernel
from headrace.back.kernels.linear.triton_skinny import skinny_kernel
from headrace.back.kernels.op import Function, PlanCheck, Sample
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
)

log = logging.getLogger(__name__)

CHECKED_TOKENS = (*(1 << i for i in range(7)), *range(128, 513, 64), 1024, 2048, MAX_TOKENS)
"""Numbers of tokens whose plans are checked at start: all that `padded` gives up to 512, and some
beyond."""
LIBRARY_TOKENS = 96
"""A number of tokens of which the library computes most GEMMs, with ours around it."""
READ_AHEAD = frozenset({"gemv", "gemv_bytes", "skinny", "stream"})
"""Kernels that read the weight before the kernel in front of them has written its results."""
Launch = Callable[[torch.Tensor, torch.Tensor], None]


class LaunchScaled(Protocol):
    """`Launch` for tokens of e4m3 numbers too."""

    def __call__(
        self, x_TI: torch.Tensor, y_TY: torch.Tensor, x_scales_T: torch.Tensor | None = None
    ) -> None:
        """`x_scales_T`: float32, what the numbers of a token are times."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Gemm:
    """y = act(norm(x) W^T + b), with `add` added to what y holds. `activation` "" and `norm_I`
    None: none. A weight of e4m3 numbers or integers has `scales_OG` (float32), one for each `group`
    inputs of an output, and `minima_OG` where groups have them."""

    weight_OI: torch.Tensor
    scales_OG: torch.Tensor | None = None
    minima_OG: torch.Tensor | None = None
    group: int = 0
    bias_O: torch.Tensor | None = None
    norm_I: torch.Tensor | None = None
    eps: float = 0.0
    activation: str = ""
    add: bool = False

    @property
    def results(self) -> int:
        """Columns of y."""
        return len(self.weight_OI) // (2 if self.activation else 1)


def refusal(inputs: int, activation: str | None) -> str | None:
    """Why these kernels cannot compute a GEMM, if so."""
    if inputs % 8:
        return f"{inputs} inputs are no multiple of 8"
    if activation and activation not in ACTIVATIONS:
        return f"does not know {activation}"
    return None


def small(gemm: Gemm, *, fresh: bool = False) -> Callable[[int], Launch | None]:
    """For a number of tokens the launch `f(x_TI, y_TY)`, None where the library's GEMM is taken.
    With a norm one token only: see triton_skinny.py. `fresh`: the kernel in front writes the
    weight."""
    outputs, inputs = gemm.weight_OI.shape
    device = gemm.weight_OI.device
    without = unfit(gemm) | (READ_AHEAD if fresh else set())

    @cache
    def launch_of(tokens: int) -> Launch | None:
        plan = plan_for(
            gemm_device_of(device),
            outputs,
            inputs,
            tokens,
            gated=bool(gemm.activation),
            without=without,
        )
        return plan and launcher(gemm, plan, tokens)

    one_alone = gemm.norm_I is not None
    return lambda tokens: None if one_alone and tokens > 1 else launch_of(padded(tokens))


def unfit(gemm: Gemm) -> set[str]:
    """The kernels that not every device and GEMM has, where this one lacks them."""
    weight_OI, activation = gemm.weight_OI, gemm.activation
    reasons = {
        "stream": stream.unfit(weight_OI, activation),
        "wide": wide.unfit(weight_OI, gemm.bias_O, activation, add=gemm.add),
    }
    return {kernel for kernel, reason in reasons.items() if reason is not None}


@cache
def gemm_device_of(device: torch.device) -> GemmDevice:
    """The facts that plans are chosen by; those of an H200 under the interpreter."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return GemmDevice(
            name=device.type, capability=(0, 0), sms=132, memory_gb_s=4800.0, bf16_tflops=989.0
        )
    facts = torch.cuda.get_device_properties(device)
    # Two transfers a clock; kHz times bits gives 10^3 bits per second.
    clock_khz, bus_bits = (
        getattr(facts, name, 0) for name in ("memory_clock_rate", "memory_bus_width")
    )
    return gemm_device(
        facts.name,
        (facts.major, facts.minor),
        facts.multi_processor_count,
        memory_gb_s=2 * clock_khz * 1e3 * bus_bits / 8 / 1e9 or None,
    )


def source_of(device: str, outputs: int, inputs: int, *, gated: bool = False) -> str:
    """Where the plans of a shape come from, for the table of decisions; nothing for a GPU that is
    not here: which tables it has is seen there."""
    if device == "cuda" and not torch.cuda.is_available():
        return ""
    return source(gemm_device_of(torch.device(device)), outputs, inputs, gated=gated)


def distinct_plans(gemm: Gemm) -> list[tuple[GemmPlan, int]]:
    """Every plan that some number of tokens takes, each with a number that makes a kernel of its
    own: tokens of "skinny" and "stream" are sizes of the compiled kernel."""
    outputs, inputs = gemm.weight_OI.shape
    device = gemm_device_of(gemm.weight_OI.device)
    gated, without = bool(gemm.activation), unfit(gemm)
    plans: dict[tuple[GemmPlan, int], int] = {}
    for tokens in (1,) if gemm.norm_I is not None else CHECKED_TOKENS:
        plan = plan_for(device, outputs, inputs, tokens, gated=gated, without=without)
        if plan is not None:
            plans[plan, _compiled_tokens(plan, tokens)] = 2 * plan.m + 3 if plan.m else tokens
    return [(plan, tokens) for (plan, _), tokens in plans.items()]


def _compiled_tokens(plan: GemmPlan, tokens: int) -> int:
    least = {"skinny": 16, "stream": stream.LEAST_TOKENS}
    return max(least[plan.kernel], tokens) if plan.kernel in least else 0


def plan_checks(
    gemms: list[tuple[Gemm, GemmPlan, int]],
    *,
    sample: Callable[[int], Sample],
    bind_plan: Callable[..., Function],
    bind: Callable[..., Function],
) -> list[PlanCheck]:
    """Each plan of our kernels on the whole shape, then the library's GEMM. `sample`: inputs of so
    many tokens; `bind_plan` takes a GEMM, a plan and its tokens before what `bind` takes."""

    def skip_of(gemm: Gemm, plan: GemmPlan) -> Callable[[str], None]:
        gated = bool(gemm.activation)
        shape = shape_name(*gemm.weight_OI.shape, gated=gated)
        return partial(skip_plan, gemm.weight_OI.device, shape, plan)

    checks = [
        PlanCheck(
            name=f"{plan.kernel} of {tokens} tokens",
            sample=partial(sample, tokens),
            bind=partial(bind_plan, gemm, plan, tokens),
            skip=skip_of(gemm, plan),
        )
        for gemm, plan, tokens in gemms
    ]
    many = partial(sample, LIBRARY_TOKENS)
    return [*checks, PlanCheck(name=f"{LIBRARY_TOKENS} tokens", sample=many, bind=bind)]


def skip_plan(device: torch.device, shape: str, plan: GemmPlan, reason: str) -> None:
    """Goes on without the plan's kernel for a shape (`shape_name`)."""
    log.warning("GEMM %s goes without %s: %s", shape, plan.kernel, reason)
    skip(gemm_device_of(device), shape, plan.kernel)


def launcher(gemm: Gemm, plan: GemmPlan, tokens: int) -> Launch:
    """The launch for up to `tokens` tokens (a padded number) by a plan."""
    return _KINDS[plan.kernel](gemm, plan, tokens)


def _shared(gemm: Gemm) -> dict[str, int | bool | str]:
    return {
        "INPUTS": gemm.weight_OI.shape[1],
        "OUTPUTS": gemm.results,
        "GROUP": gemm.group,
        "BIAS": gemm.bias_O is not None,
        "ACTIVATION": gemm.activation,
        "ADD": gemm.add,
    }


def _gemv(gemm: Gemm, plan: GemmPlan, tokens: int) -> Launch:
    assert tokens == 1, tokens
    grid = (triton.cdiv(gemm.results, plan.n),)
    rest = gemm.weight_OI.shape[1] - plan.k
    constants = {
        **_shared(gemm), "NORM": gemm.norm_I is not None, "N": plan.n, "K": plan.k,
        "PREFETCH": plan.prefetch if plan.prefetch * plan.k <= rest else 0,
    }  # fmt: skip

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        gemv_kernel[grid](
            x_TI, gemm.weight_OI, gemm.scales_OG, gemm.minima_OG, gemm.bias_O, gemm.norm_I, y_TY,
            gemm.eps, **constants, num_warps=plan.warps, **launch(x_TI.device),
        )  # fmt: skip

    return run


def _gemv_bytes(gemm: Gemm, plan: GemmPlan, tokens: int) -> Launch:
    assert tokens == 1 and gemm.scales_OG is not None and gemm.minima_OG is None, tokens
    return gemv_bytes.bind(
        gemm.weight_OI, gemm.scales_OG, gemm.bias_O, gemm.norm_I, group=gemm.group, eps=gemm.eps,
        gated=bool(gemm.activation), add=gemm.add, n=plan.n, warps=plan.warps,
    )  # fmt: skip


def skinny_launcher(gemm: Gemm, plan: GemmPlan, tokens: int) -> LaunchScaled:
    """The launch of "skinny", for tokens of e4m3 numbers too: with their scales as third."""
    m, tiles = max(16, tokens), triton.cdiv(gemm.results, plan.n)
    split = plan.split
    assert gemm.norm_I is None and (split == 1 or tiles <= COUNTERS), (tiles, split)
    share = triton.cdiv(gemm.weight_OI.shape[1], plan.k * split) * plan.k
    prefetch = plan.prefetch if plan.prefetch * plan.k <= share else 0
    constants = {
        **_shared(gemm), "M": m, "N": plan.n, "K": plan.k, "SPLIT": split,
        "PREFETCH": prefetch, "SWAP": plan.swap,
    }  # fmt: skip
    parts = tiles * split * (2 if gemm.activation else 1) * m * plan.n
    value_bytes = gemm.weight_OI.element_size()
    rows = plan.n * (2 if gemm.activation else 1)
    column_bytes = rows * value_bytes + m * max(2, value_bytes)
    stages = fitting_stages(plan.stages, column_bytes * plan.k)

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor, x_scales_T: torch.Tensor | None = None) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        partial = x_TI
        if split > 1:
            partial = torch.empty(parts, dtype=torch.float32, device=x_TI.device)
        skinny_kernel[(tiles, split)](
            x_TI, x_scales_T, gemm.weight_OI, gemm.scales_OG, gemm.minima_OG, gemm.bias_O, y_TY,
            partial, counters(x_TI.device),
            len(x_TI), x_TI.stride(0), y_TY.stride(0), **constants, num_warps=plan.warps,
            num_stages=stages, **launch(x_TI.device),
        )  # fmt: skip

    return run


def _stream(gemm: Gemm, plan: GemmPlan, tokens: int) -> Launch:
    assert gemm.norm_I is None, "the norm is a kernel of its own"
    return stream.bind(
        stream.Streamed(
            weight_OI=gemm.weight_OI,
            bias_O=gemm.bias_O,
            gated=bool(gemm.activation),
            add=gemm.add,
            results=gemm.results,
        ),
        k=plan.k,
        stages=plan.stages,
        per_sm=plan.split,
        most_tokens=tokens,
    )


def _wide(gemm: Gemm, plan: GemmPlan, tokens: int) -> Launch:
    assert gemm.norm_I is None, "the norm is a kernel of its own"
    return wide.bind(gemm.weight_OI, m=plan.m, group=plan.group)


_KINDS = {
    "gemv": _gemv, "gemv_bytes": _gemv_bytes, "skinny": skinny_launcher, "stream": _stream,
    "wide": _wide,
}  # fmt: skip
