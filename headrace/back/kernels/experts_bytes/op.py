"""The experts of a mixture with weights of a byte a number, for GPUs: op `experts`, whose symbols,
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
from headrace.back.kernels.experts_bytes.layout import ByteExperts, ByteForm, empty_experts
from headrace.back.kernels.experts_fp8.layout import ScaledMatrices
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance, random_tensor


@dataclass(frozen=True, kw_only=True)
class ExpertsBytesProblem(QuantizedExpertsProblem):
    """The mixture, and what the numbers of its weights are."""

    form: ByteForm


def bind_reference(
    problem: ExpertsBytesProblem,
    experts: ByteExperts,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The definition: an expert at a time."""
    dtype = problem.dtype

    def product(matrices: ScaledMatrices, expert: int, x_PI: torch.Tensor) -> torch.Tensor:
        return x_PI.to(dtype).float() @ matrices.floats(expert).to(dtype).float().T

    return each_expert(
        problem.mixture,
        lambda expert, x_PE: product(experts.up, expert, x_PE),
        lambda expert, inner_PI: product(experts.down, expert, inner_PI),
        (up_bias_XI, down_bias_XE),
    )


def random_experts(problem: ExpertsBytesProblem, generator: torch.Generator) -> ByteExperts:
    """Numbers of all magnitudes; products are about 1."""
    mixture, form = problem.mixture, problem.form
    experts = empty_experts(
        form, mixture.experts, mixture.width, mixture.inner, device=mixture.device
    )
    for matrices in (experts.up, experts.down):
        values, scales = matrices.values_XOI, matrices.scales_XGO
        new = {"dtype": torch.float32, "device": str(values.device), "generator": generator}
        for i in range(len(values)):
            numbers = (random_tensor(*values.shape[1:], **new) * 40).clamp_(-127, 127)
            values[i] = (numbers if form.floats else numbers.round_()).to(form.dtype)
        spread = random_tensor(*scales.shape, **new).abs_().add_(0.5) / (
            40 * values.shape[2] ** 0.5
        )
        scales.copy_(torch.exp2(spread.log2().round()) if form.floats else spread)
    return experts


def sample_of(problem: ExpertsBytesProblem, rows: tuple[int, ...]) -> Sample:
    """Three experts of the problem's own sizes, for each of these numbers of tokens."""
    return experts_sample(problem, random_experts, rows)


def _sample(problem: ExpertsBytesProblem) -> Sample:
    """Few tokens, and more, with less width."""
    return sample_of(narrow(problem), (1, 3, 40))


OP: Op[ExpertsBytesProblem] = Op(
    name="experts_bytes",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=("headrace.back.kernels.experts_bytes.triton_experts_bytes:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
