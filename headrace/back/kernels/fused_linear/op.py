"""A linear layer with what a decoder layer puts around it: y = act(norm(x) W^T + b), or added into
the residual. The order, the symbols and the reference of what stands around the GEMM: around.py.

`bind(problem, weight_OI, bias_O | None, norm_weight_I | None)` returns `f(x_TI, residual_TY | None)
-> y_TY`. A kernel may keep float32 between the stages, where the separate ops cast.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.fused_linear.around import (
    LayerGemm,
    LayerProblem,
    bind_around,
    sample_of,
    some_outputs,
)
from headrace.back.kernels.linear import op as linear
from headrace.back.kernels.op import Kernel, Op, Sample, float_tolerance, random_tensor

FusedLinear = LayerGemm
CHECKED_ROWS = (1, 3, 40)
"""One token, the case that is fused on every device, a few and many: kernels go other ways."""


class FusedLinearProblem(LayerProblem):
    """A plain weight, of the same dtype."""


def bind_reference(
    problem: FusedLinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> FusedLinear:
    """The reference: the references of the separate ops, one after the other."""
    plain = linear.LinearProblem(
        device=problem.device,
        dtype=problem.dtype,
        inputs=problem.inputs,
        outputs=problem.outputs,
        bias=problem.bias,
    )
    gemm = linear.bind_reference(plain, weight_OI, bias_O)
    return bind_around(problem, gemm, None, norm_weight_I)


def _random_weight(problem: FusedLinearProblem, generator: torch.Generator) -> torch.Tensor:
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    return random_tensor(problem.outputs, problem.inputs, **new) / problem.inputs**0.5


def _sample(problem: FusedLinearProblem) -> Sample:
    return sample_of(some_outputs(problem), _random_weight, CHECKED_ROWS)


OP: Op[FusedLinearProblem] = Op(
    name="fused_linear",
    reference=Kernel(
        name="separate ops", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.linear.native:GATED_KERNEL",
        "headrace.back.kernels.fused_linear.triton_fused_linear:KERNEL",
        "headrace.back.kernels.fused_linear.triton_fixed:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
