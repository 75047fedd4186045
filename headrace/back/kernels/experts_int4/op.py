"""The experts of a mixture with weights of 4-bit numbers, for GPUs: op `experts`, whose symbols,
activations and biases are these.

`bind(problem, experts, up_bias_XI, down_bias_XE)` returns `f(x_TE, expert_TK, weight_TK) -> y_TE`.

The weights' numbers are rounded to the dtype of x once, and multiplied in float32; inner values are
rounded to it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.experts.op import Experts, each_expert
from headrace.back.kernels.experts.quantized import QuantizedExpertsProblem, narrow
from headrace.back.kernels.experts.quantized import sample_of as experts_sample
from headrace.back.kernels.experts_int4.layout import (
    Int4Experts,
    Int4Form,
    empty_experts,
    write_matrix,
)
from headrace.back.kernels.linear_int4.layout import dequantize
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance, random_tensor


@dataclass(frozen=True, kw_only=True)
class ExpertsInt4Problem(QuantizedExpertsProblem):
    """The mixture, and what the numbers of its weights are; `dtype` is that of scales too."""

    form: Int4Form


def bind_reference(
    problem: ExpertsInt4Problem,
    experts: Int4Experts,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The definition: an expert at a time."""
    dtype = problem.dtype

    def product(name: str, expert: int, x_PI: torch.Tensor) -> torch.Tensor:
        return x_PI.float() @ dequantize(experts.matrix(name, expert), dtype).float().T

    def up(expert: int, x_PE: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(name, expert, x_PE) for name in ("gate", "up")], dim=1)

    def down(expert: int, inner_PI: torch.Tensor) -> torch.Tensor:
        return product("down", expert, inner_PI.to(dtype))

    return each_expert(problem.mixture, up, down, (up_bias_XI, down_bias_XE))


def random_experts(problem: ExpertsInt4Problem, generator: torch.Generator) -> Int4Experts:
    """Numbers over their whole range; scales of about 1 / 8 of a usual weight, of e2m1 numbers
    powers of two."""
    mixture, form = problem.mixture, problem.form
    sizes = {"gate": (mixture.inner, mixture.width), "up": (mixture.inner, mixture.width)}
    sizes["down"] = (mixture.width, mixture.inner)
    experts = empty_experts(
        form, mixture.experts, mixture.width, mixture.inner, dtype=mixture.dtype,
        device=mixture.device,
    )  # fmt: skip
    new = {"dtype": torch.float32, "device": mixture.device, "generator": generator}
    for expert in range(mixture.experts):
        for name, (outputs, inputs) in sizes.items():
            groups = 1 if form.group is None else -(-inputs // form.group)
            scales = random_tensor(outputs, groups, **new).abs_().add_(0.5) / (4 * inputs**0.5)
            values = random_tensor(outputs, inputs, **new) * 4 + 8
            minima = None
            if form.minima:
                minima = scales * (random_tensor(outputs, groups, **new) + 7.5)
            if form.floats:
                scales = torch.exp2(scales.log2().round())
            write_matrix(experts, name, expert, values.round_().clamp_(0, 15), scales, minima)
    return experts


def sample_of(problem: ExpertsInt4Problem, rows: tuple[int, ...]) -> Sample:
    """Three experts of the problem's own sizes, for each of these numbers of tokens."""
    return experts_sample(problem, random_experts, rows)


def _sample(problem: ExpertsInt4Problem) -> Sample:
    """Few tokens, and more, with less width."""
    return sample_of(narrow(problem), (3, 40))


OP: Op[ExpertsInt4Problem] = Op(
    name="experts_int4",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=("headrace.back.kernels.experts_int4.triton_experts_int4:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
