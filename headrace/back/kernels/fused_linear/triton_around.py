"""What the Triton kernels of quantized layers share of what stands around their GEMMs: the norm
before on its own, where the result goes, and which problems all of them refuse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.kernels.fused_linear.around import (
    LayerGemm,
    LayerProblem,
    QuantizedLayerProblem,
    activation_problem,
    norm_problem,
)
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.gated_act.triton_gated_act import ACTIVATIONS
from headrace.back.kernels.linear import triton_scaled_gemm, triton_scaled_rows
from headrace.back.kernels.linear.scaled_rows import ScaledRows
from headrace.back.kernels.rms_norm import triton_rms_norm
from headrace.back.kernels.triton.wrap import unsupported

UNIT = 16
"""Inputs of a weight are a multiple of it."""


def bind_norm_before(
    problem: LayerProblem, norm_weight_I: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The norm of the problem, None: there is none."""
    if problem.eps is None:
        return None
    assert norm_weight_I is not None, "a norm has a weight"
    return triton_rms_norm.bind_norm(norm_problem(problem), norm_weight_I)


def after_norm(norm: Callable[[torch.Tensor], torch.Tensor] | None, gemm: LayerGemm) -> LayerGemm:
    """A GEMM with the norm before it."""
    if norm is None:
        return gemm
    return lambda x_TI, residual_TY: gemm(norm(x_TI), residual_TY)


def bind_after(
    problem: LayerProblem, multiply: Callable[[ScaledRows], torch.Tensor]
) -> Callable[[ScaledRows, torch.Tensor | None], torch.Tensor]:
    """A GEMM of quantized tokens, with what comes after it."""
    activate = None
    if problem.activation is not None:
        activate = triton_gated_act.bind(activation_problem(problem))

    def layer(rows: ScaledRows, residual_TY: torch.Tensor | None) -> torch.Tensor:
        y_TY = multiply(rows)
        if activate is not None:
            y_TY = activate(y_TY)
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return layer


def bind_int8_rows(
    problem: QuantizedLayerProblem,
    weight: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    group: int | None,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
    **fixed: torch.Tensor | None,
) -> LayerGemm:
    """Tokens that become int8 with the norm before them, times a weight of int8 numbers and float32
    scales, and what comes after. `weight` is asked in each step; `fixed`: a scale and a zero point
    of all tokens (triton_scaled_rows.bind)."""
    quantize = triton_scaled_rows.bind(
        problem.inputs,
        None,
        norm_weight_I=norm_weight_I,
        eps=problem.eps or 0.0,
        dtype=torch.int8,
        **fixed,
    )

    def multiply(rows: ScaledRows) -> torch.Tensor:
        shape = len(rows.values_TI), problem.outputs
        y_TO = torch.empty(shape, dtype=problem.result_dtype, device=rows.values_TI.device)
        triton_scaled_gemm.multiply(rows, *weight(), group, bias_O, y_TO)
        return y_TO

    after = bind_after(problem, multiply)
    return lambda x_TI, residual_TY: after(quantize(x_TI), residual_TY)


def result_for(
    problem: LayerProblem, x_TI: torch.Tensor, residual_TY: torch.Tensor | None
) -> torch.Tensor:
    """Where y goes: the residual, or new memory."""
    if residual_TY is not None:
        return residual_TY
    return x_TI.new_empty(len(x_TI), problem.results, dtype=problem.result_dtype)


def refusal_of(problem: QuantizedLayerProblem, groups: tuple[int, ...]) -> str | None:
    """Why no kernel of quantized weights serves, if so. `groups`: the inputs that may share a
    scale, where not all do."""
    reason = unsupported(problem.device, problem.dtype)
    if reason is not None:
        return reason
    if problem.inputs % UNIT:
        return f"{problem.inputs} inputs are no multiple of {UNIT}"
    if problem.group not in (None, *groups):
        return f"scales of {', '.join(map(str, groups))} inputs or of all, not of {problem.group}"
    if problem.activation is not None and problem.activation not in ACTIVATIONS:
        return f"does not know {problem.activation}"
    return None
