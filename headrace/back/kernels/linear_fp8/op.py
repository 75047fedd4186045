"""A linear layer with a weight of e4m3 numbers, with what a decoder layer puts around it: y =
act(norm(x) W^T + b), or added into the residual. For GPUs; CPUs read such weights in panels
(linear_quant).

`bind(problem, weight, bias_O | None, norm_weight_I | None)` as of kernels/fused_linear/around.py.

Fewer than `quantized_from` tokens multiply the weight as they are. More are quantized themselves,
each token by its own scale (or each `group` inputs of it), for the tensor cores to multiply e4m3
by e4m3: turning a weight's numbers into floats takes more time than reading them (H200, 4096 to
24,576 with an activation, 32 tokens: 80 us where 23 read it). The result may be rounded to the
dtype before the activation; where tokens stay as they are, so may the weight.

Two layers behind each other may leave the activation between them to the second, whose tokens then
become e4m3 in the same pass: with `late` more than STREAMED_TOKENS tokens are left as gates and
ups [T, O], and with `gated` as many are taken so [T, 2I], before that activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.back.kernels.fused_linear.around import (
    LayerGemm,
    QuantizedLayerProblem,
    bind_around,
    gpu_refusal,
    some_outputs,
)
from headrace.back.kernels.fused_linear.around import sample_of as layer_sample
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_act.op import bind_reference as bind_activation
from headrace.back.kernels.linear_fp8.layout import (
    FLOAT8,
    Fp8Weight,
    dequantize,
    dequantize_rows,
    quantize_rows,
)
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

STREAMED_TOKENS = 64
"""The kernels that stream the weight take up to so many."""
STEP = 128
"""Inputs that these multiply at a time."""
CHECKED_ROWS = (1, 5, 20, 40, STREAMED_TOKENS + 16)


@dataclass(frozen=True, kw_only=True)
class LinearFp8Problem(QuantizedLayerProblem):
    """The layer, and the groups of its weight; `fixed`: tokens have one scale, held with it.
    `late`: the activation of many tokens is left to the layer behind; `gated`: an activation that
    was left to this one, None: none."""

    fixed: bool = False
    late: bool = False
    gated: str | None = None

    @property
    def quantized_from(self) -> int | None:
        """Tokens that become e4m3, and more; None: none do. Sums of groups smaller than a step
        would have to become floats where tensor cores multiply e4m3 by e4m3: MXFP8's weights are
        dequantized before the GEMM (H200, the four layers of Qwen3-8B, 65 tokens: 291 us where that
        took 759; 8,192 tokens: 4,326 and 19,206)."""
        return 2 if self.group in (None, STEP) else None

    def quantizes(self, tokens: int) -> bool:
        """Whether so many become e4m3."""
        return self.quantized_from is not None and tokens >= self.quantized_from


def fp8_refusal(dtype: torch.dtype) -> str | None:
    """Why no kernel of ours can serve on this machine's GPU, whatever the weight's size, if so."""
    return gpu_refusal(OP, LinearFp8Problem, dtype)


def bind_reference(
    problem: LinearFp8Problem,
    weight: Fp8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> LayerGemm:
    """The definition, products in float32."""

    def gemm(x_TI: torch.Tensor) -> torch.Tensor:
        if not problem.quantizes(len(x_TI)):
            return x_TI.float() @ dequantize(weight).T
        rows = quantize_rows(x_TI, problem.group, weight.input_scale_1)
        return dequantize_rows(rows, problem.group) @ dequantize(weight).T

    layer = bind_around(problem, gemm, bias_O, norm_weight_I)
    left = bind_around(replace(problem, activation=None), gemm, bias_O, norm_weight_I)
    before = None
    if problem.gated is not None:
        before = bind_activation(gates_before(problem))

    def run(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        many = len(x_TI) > STREAMED_TOKENS
        x_TI = before(x_TI) if before is not None and many else x_TI
        return (left if problem.late and many else layer)(x_TI, residual_TY)

    return run


def gates_before(problem: LinearFp8Problem) -> GatedActProblem:
    """The activation that was left to a layer, on its own."""
    assert problem.gated is not None, problem
    return GatedActProblem(
        device=problem.device, dtype=problem.dtype, width=problem.inputs, activation=problem.gated
    )


def random_weight(problem: LinearFp8Problem, generator: torch.Generator) -> Fp8Weight:
    """Normal numbers of all magnitudes below 448; scales of about 1 / 100 of a usual weight."""
    outputs, inputs, group = problem.outputs, problem.inputs, problem.group
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    values = (random_tensor(outputs, inputs, **new) * 100).clamp_(-448, 448).to(FLOAT8)
    groups = 1 if group is None else -(-inputs // group)
    scales = random_tensor(outputs, groups, **new).abs_().add_(0.5) / (100 * inputs**0.5)
    fixed = torch.full((1,), 1 / 128, device=problem.device) if problem.fixed else None
    return Fp8Weight(values, scales, group, fixed)


def sample_of(problem: LinearFp8Problem, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    sample = layer_sample(problem, random_weight, rows)
    if problem.gated is None:
        return sample
    generator = sample_generator(problem.device)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}

    def taken(x_TI: torch.Tensor, residual_TY: torch.Tensor | None) -> tuple[Any, ...]:
        if len(x_TI) > STREAMED_TOKENS:
            x_TI = random_tensor(len(x_TI), 2 * problem.inputs, **new)
        return x_TI, residual_TY

    return replace(
        sample, arguments=taken(*sample.arguments), further=tuple(taken(*m) for m in sample.further)
    )


def _sample(problem: LinearFp8Problem) -> Sample:
    return sample_of(some_outputs(problem), CHECKED_ROWS)


OP: Op[LinearFp8Problem] = Op(
    name="linear_fp8",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_fp8.triton_linear_fp8:KERNEL",),
    sample=_sample,
    # A token's value half-way between two e4m3 numbers may become either: 1 / 16 of one product.
    tolerance=lambda problem: max(float_tolerance(problem.dtype), 4e-3),
)
