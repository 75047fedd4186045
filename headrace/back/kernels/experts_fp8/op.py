"""The experts of a mixture with weights of e4m3 numbers, for GPUs: op `experts`, whose symbols,
activations and biases are these.

`bind(problem, experts, up_bias_XI, down_bias_XE)` returns `f(x_TE, expert_TK, weight_TK) -> y_TE`.

Fewer than QUANTIZED_FROM tokens multiply the weights as they are, and their inner values are
rounded to the dtype. More become e4m3 numbers themselves, with a scale for GROUP inputs or one for
all that the experts hold, and so do their inner values, for the tensor cores to multiply e4m3 by
e4m3. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from headrace.back.kernels.experts.op import Experts, each_expert
from headrace.back.kernels.experts.quantized import QuantizedExpertsProblem, narrow
from headrace.back.kernels.experts.quantized import sample_of as experts_sample
from headrace.back.kernels.experts_fp8.layout import (
    GROUP,
    Fp8Experts,
    ScaledMatrices,
    empty_experts,
)
from headrace.back.kernels.linear_fp8.layout import FLOAT8, dequantize_rows, quantize_rows
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance, random_tensor

QUANTIZED_FROM = 2
"""Tokens of a step."""
FLIPPED = 8e-3
"""A value that another order of sums rounds to the next e4m3 number moves a result by up to this
share of the largest one."""


@dataclass(frozen=True, kw_only=True)
class ExpertsFp8Problem(QuantizedExpertsProblem):
    """The mixture; `group`: inputs that share a scale of the weights, None: all. `fixed`: the
    experts hold the scales of their inputs."""

    group: int | None
    fixed: bool = False


def bind_reference(
    problem: ExpertsFp8Problem,
    experts: Fp8Experts,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The definition: an expert at a time."""
    mixture, biases = problem.mixture, (up_bias_XI, down_bias_XE)

    def by(*rows: Callable[[torch.Tensor], torch.Tensor]) -> Experts:
        first, second = rows
        return each_expert(
            mixture,
            lambda expert, x_PE: first(x_PE) @ experts.up.floats(expert).T,
            lambda expert, inner_PI: second(inner_PI) @ experts.down.floats(expert).T,
            biases,
        )

    few = by(*(lambda rows: rows.to(problem.dtype).float(),) * 2)
    many = by(*(partial(rounded, scale_1=scale_1) for scale_1 in experts.fixed))

    def run(x_TE: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        chosen = few if len(x_TE) < QUANTIZED_FROM else many
        return chosen(x_TE, *more)

    return run


def rounded(x_TI: torch.Tensor, scale_1: torch.Tensor | None = None) -> torch.Tensor:
    """What is multiplied in place of x, float32."""
    return dequantize_rows(quantize_rows(x_TI, GROUP, scale_1), GROUP)


def random_experts(problem: ExpertsFp8Problem, generator: torch.Generator) -> Fp8Experts:
    """Normal numbers of all magnitudes below 448; products are about 1."""
    mixture = problem.mixture
    experts = empty_experts(
        problem.group, mixture.experts, mixture.width, mixture.inner, device=mixture.device,
        fixed=problem.fixed,
    )  # fmt: skip
    if experts.inputs_2 is not None:
        experts.inputs_2.fill_(1 / 128)
    for matrices in (experts.up, experts.down):
        _fill(matrices, generator)
    return experts


def _fill(matrices: ScaledMatrices, generator: torch.Generator) -> None:
    values, scales = matrices.values_XOI, matrices.scales_XGO
    new = {"dtype": torch.float32, "device": str(values.device), "generator": generator}
    for i in range(len(values)):
        values[i] = (random_tensor(*values.shape[1:], **new) * 100).clamp_(-448, 448).to(FLOAT8)
    spread = random_tensor(*scales.shape, **new).abs_().add_(0.5)
    scales.copy_(spread / (100 * values.shape[2] ** 0.5))


def sample_of(problem: ExpertsFp8Problem, rows: tuple[int, ...]) -> Sample:
    """Three experts of the problem's own sizes, for each of these numbers of tokens."""
    return experts_sample(problem, random_experts, rows)


def _sample(problem: ExpertsFp8Problem) -> Sample:
    """Few tokens, and more, with less width."""
    return sample_of(narrow(problem), (1, 40))


OP: Op[ExpertsFp8Problem] = Op(
    name="experts_fp8",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=("headrace.back.kernels.experts_fp8.triton_experts_fp8:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: max(float_tolerance(problem.dtype), FLIPPED),
)
