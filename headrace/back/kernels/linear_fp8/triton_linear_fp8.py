"""Which kernel serves how many tokens of a weight of e4m3 numbers: one token gemv, or on Hopper
gemv_bytes (with the norm; they turn the numbers into floats in registers), up to 64 skinny (all of
kernels/linear), by tokens of e4m3 numbers but where 32 inputs share a scale, more the library's
scaled GEMM, or ours where that has none; of 32 inputs a scale the library's GEMM of floats, with
the weight dequantized before it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F

from headrace.back.kernels.fused_linear.around import LayerGemm, activation_problem
from headrace.back.kernels.fused_linear.triton_around import (
    UNIT,
    after_norm,
    bind_after,
    bind_norm_before,
    refusal_of,
    result_for,
)
from headrace.back.kernels.linear import gemv_bytes, triton_scaled_gemm, triton_scaled_rows
from headrace.back.kernels.linear.dequantized import bind_dequantized
from headrace.back.kernels.linear.scaled_rows import FLOAT8, ScaledRows
from headrace.back.kernels.linear.table import BUSY, MOST_SPLIT_TILES, GemmPlan, padded
from headrace.back.kernels.linear.triton_dequantize_bytes import dequantize_into
from headrace.back.kernels.linear.triton_small import (
    Gemm,
    Launch,
    LaunchScaled,
    gemm_device_of,
    launcher,
    skinny_launcher,
)
from headrace.back.kernels.linear_fp8.layout import Fp8Weight
from headrace.back.kernels.linear_fp8.op import (
    CHECKED_ROWS,
    STREAMED_TOKENS,
    LinearFp8Problem,
    sample_of,
)
from headrace.back.kernels.op import Kernel, PlanCheck
from headrace.back.kernels.triton.wrap import capability, interpreted

log = logging.getLogger(__name__)

GROUP = 128
"""Inputs of a step, and that share a scale, where not all do; or MICROSCALED."""
MICROSCALED = 32
HOPPER = 9
SCALES_SIDE_BY_SIDE = 4
"""Tokens whose scales the library reads at once."""
Multiply = Callable[[ScaledRows], torch.Tensor]


def plan_of(
    outputs: int,
    inputs: int,
    tokens: int,
    *,
    gated: bool,
    sms: int,
    by_bytes: bool = False,
    grouped: bool = False,
) -> GemmPlan:
    """The plan for a padded number of tokens up to 64: of one, what an H200 took least time for
    (benchmarks/h200/quantized.md), `by_bytes` where linear/gemv_bytes.py serves; of more, tiles as
    of bfloat16 weights by rule (linear/table.py), of as many inputs a step as those have bytes.
    `grouped`: groups of inputs have scales of their own."""
    if tokens == 1 and by_bytes:
        n, warps = (4, 4) if outputs > 4096 else (8, 2)
        if grouped and (gated or outputs <= 4096):
            n, warps = (4, 8) if gated else (4, 2) if inputs > 8192 else (8, 4)
        return GemmPlan(kernel="gemv_bytes", n=n, k=512 * warps, warps=warps)
    if tokens == 1:
        if inputs > 8192:
            return GemmPlan(kernel="gemv", n=4, k=2048, warps=4, prefetch=2)
        if outputs <= 4096:
            return GemmPlan(kernel="gemv", n=8, k=512, warps=4, prefetch=2)
        if gated or outputs > 8192:
            return GemmPlan(kernel="gemv", n=2, k=2048, warps=4)
        return GemmPlan(kernel="gemv", n=4, k=2048, warps=8)
    tiles = -(-outputs // (2 if gated else 1) // 64)
    splits = [split for split in (1, 2, 4) if inputs // split >= 2 * GROUP]
    enough = (split for split in splits if tiles * split >= BUSY * sms)
    split = next(enough, max(splits, default=1)) if tiles <= MOST_SPLIT_TILES else 1
    return GemmPlan(
        kernel="skinny", n=64, k=GROUP, warps=4, stages=6, split=split, prefetch=2, swap=True
    )


def bind(
    problem: LinearFp8Problem,
    weight: Fp8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> LayerGemm:
    """The kernels for one weight, read as it is."""
    several = Gemm(
        weight_OI=weight.values_OI,
        scales_OG=weight.scales_OG,
        group=weight.group or weight.inputs,
        bias_O=bias_O,
        activation=problem.activation or "",
        add=problem.add,
    )
    one = replace(several, norm_I=norm_weight_I, eps=problem.eps or 0.0)
    norm = bind_norm_before(problem, norm_weight_I)
    quantize = triton_scaled_rows.bind(
        problem.inputs, problem.group, norm_weight_I=norm_weight_I, eps=problem.eps or 0.0,
        scale_1=weight.input_scale_1,
    )  # fmt: skip
    behind = replace(problem, activation=None) if problem.late else problem
    many = bind_after(behind, _product(problem, weight, bias_O))
    quantize_many, plain = quantize, None
    if problem.gated is not None:
        quantize_many = triton_scaled_rows.bind(
            problem.inputs, problem.group, norm_weight_I=None, eps=0.0,
            scale_1=weight.input_scale_1, activation=problem.gated,
        )  # fmt: skip
    if problem.quantized_from is None:
        plain = after_norm(norm, _dequantized(behind, weight, bias_O))

    def planned(tokens: int) -> GemmPlan:
        values_OI, activation = weight.values_OI, problem.activation or ""
        return plan_of(
            weight.outputs, weight.inputs, tokens, gated=bool(activation),
            sms=gemm_device_of(values_OI.device).sms,
            by_bytes=gemv_bytes.unfit(values_OI, several.group, activation) is None,
            grouped=weight.group is not None,
        )  # fmt: skip

    @cache
    def launch_of(tokens: int) -> Launch:
        return launcher(one if tokens == 1 else several, planned(tokens), tokens)

    @cache
    def launch_scaled_of(tokens: int) -> LaunchScaled:
        return skinny_launcher(several, planned(tokens), tokens)

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = len(x_TI)
        if num_tokens > STREAMED_TOKENS:
            if plain is not None:
                return plain(x_TI, residual_TY)
            return many(quantize_many(x_TI), residual_TY)
        y_TY = result_for(problem, x_TI, residual_TY)
        if problem.quantizes(num_tokens):
            rows = quantize(x_TI)
            launch_scaled_of(padded(num_tokens))(rows.values_TI, y_TY, rows.scales_TG)
            return y_TY
        if norm is not None and num_tokens > 1:
            x_TI = norm(x_TI)
        launch_of(padded(num_tokens))(x_TI, y_TY)
        return y_TY

    return linear


def _dequantized(
    problem: LinearFp8Problem, weight: Fp8Weight, bias_O: torch.Tensor | None
) -> LayerGemm:
    def into(weight: Fp8Weight, y_OI: torch.Tensor) -> None:
        dequantize_into(weight.values_OI, weight.scales_OG, weight.group, y_OI)

    act = None if problem.activation is None else activation_problem(problem)
    return bind_dequantized(
        weight, into, bias_O, dtype=problem.dtype, activation=act, add=problem.add,
        wide=problem.wide,
    )  # fmt: skip


_skipped: dict[LinearFp8Problem, str] = {}
"""What goes without the library in this process: its self-check failed."""


def library_refusal(problem: LinearFp8Problem) -> str | None:
    """Why the library's GEMM cannot be taken, if so."""
    if problem in _skipped:
        return _skipped[problem]
    if interpreted() or problem.device != "cuda":
        return "is called on GPUs only"
    if problem.group not in (None, GROUP):
        return f"a scale for each output, or for {GROUP} inputs of one"
    if problem.group is not None and capability()[0] != HOPPER:
        return "groups of inputs by Hopper's library alone"
    if problem.inputs % UNIT or problem.outputs % UNIT:
        return f"takes multiples of {UNIT}"
    if problem.dtype is not torch.bfloat16 or problem.wide:
        return "gives bfloat16"
    return None


def _product(problem: LinearFp8Problem, weight: Fp8Weight, bias_O: torch.Tensor | None) -> Multiply:
    dtype = torch.float32 if problem.wide else problem.dtype

    def ours(rows: ScaledRows) -> torch.Tensor:
        shape = len(rows.values_TI), problem.outputs
        y_TO = torch.empty(shape, dtype=dtype, device=rows.values_TI.device)
        triton_scaled_gemm.multiply(
            rows, weight.values_OI, weight.scales_OG, weight.group, bias_O, y_TO
        )
        return y_TO

    if library_refusal(problem) is not None:
        return ours
    weight_IO, scales_GO = weight.values_OI.t(), weight.scales_OG.t()

    def library(rows: ScaledRows) -> torch.Tensor:
        return torch._scaled_mm(
            rows.values_TI,
            weight_IO,
            scale_a=rows.scales_TG,
            scale_b=scales_GO,
            bias=bias_O,
            out_dtype=dtype,
            use_fast_accum=True,
        )

    def library_in_groups(rows: ScaledRows) -> torch.Tensor:
        # The library wants the scales of a group beside each other, and whole vectors of them.
        num_tokens = len(rows.values_TI)
        more = -num_tokens % SCALES_SIDE_BY_SIDE
        values_TI = rows.values_TI
        if more:
            values_TI = F.pad(values_TI.view(torch.int8), (0, 0, 0, more)).view(FLOAT8)
        y_TO = torch._scaled_mm(
            values_TI,
            weight_IO,
            scale_a=F.pad(rows.scales_TG.t(), (0, more)).contiguous().t(),
            scale_b=scales_GO.contiguous(),
            out_dtype=dtype,
        )[:num_tokens]
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    return library if problem.group is None else library_in_groups


def plans(problem: LinearFp8Problem) -> list[PlanCheck]:
    """Each kernel on the whole shape; ours takes the place of the library's where that fails."""
    by_library = library_refusal(problem) is None

    def skip_library(reason: str) -> None:
        log.warning("%s goes without the library's GEMM: %s", problem, reason)
        _skipped[problem] = reason

    return [
        PlanCheck(
            name=f"{tokens} tokens",
            sample=partial(sample_of, problem, (tokens,)),
            bind=bind,
            skip=skip_library if by_library and tokens > STREAMED_TOKENS else None,
        )
        for tokens in CHECKED_ROWS
    ]


def _supports(problem: LinearFp8Problem) -> str | None:
    reason = refusal_of(problem, (MICROSCALED, GROUP))
    if reason is not None:
        return reason
    if torch.version.hip is not None:
        return "is for NVIDIA's GPUs"
    if problem.gated is not None and problem.quantized_from is None:
        return "takes gates and ups where many tokens become e4m3"
    if not interpreted() and capability() < (8, 9):
        return "fp8 needs compute capability 8.9, not {}.{}".format(*capability())
    return None


def _note(problem: LinearFp8Problem) -> str:
    if problem.quantized_from is None:
        return f"from {STREAMED_TOKENS + 1} tokens on dequantized before the GEMM"
    whose = "the library" if library_refusal(problem) is None else "our kernel"
    few = f"up to {problem.quantized_from - 1} tokens as they are; more quantized"
    return f"{few}, beyond {STREAMED_TOKENS} by {whose}"


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, plans=plans, note=_note)
