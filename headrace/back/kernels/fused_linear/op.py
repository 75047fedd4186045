"""A linear layer with what a decoder layer puts around it: y = act(norm(x) W^T + b), or added into
the residual.

`bind(problem, weight_OI, bias_O | None, norm_weight_I | None)` returns `f(x_TI, residual_TY | None)
-> y_TY`. T tokens, I inputs, O outputs, Y = O, or O / 2 with an activation. In this order, each
where the problem names it:

    eps          x is normed over its inputs (kernels/rms_norm; the weight is float32), not in place
    activation   the first half of the outputs gates the second (kernels/gated_act)
    add          the result is added into `residual_TY` in place, and that is returned

A kernel may keep float32 between the stages, where the separate ops cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act import op as gated_act
from headrace.back.kernels.linear import op as linear
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rms_norm import op as rms_norm

MORE_ROWS = (3, 40)
"""Rows of a check beside one: kernels go other ways for a few and for many."""
FusedLinear = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class FusedLinearProblem:
    """`dtype` is that of x, weight, bias and result. `eps` of the norm before, `activation` after,
    None: none."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool = False
    eps: float | None = None
    activation: str | None = None
    add: bool = False

    @property
    def results(self) -> int:
        """Y."""
        return self.outputs if self.activation is None else self.outputs // 2


def norm_problem(problem: FusedLinearProblem) -> rms_norm.RMSNormProblem:
    """The norm before, on its own."""
    assert problem.eps is not None
    return rms_norm.RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.inputs, eps=problem.eps
    )


def activation_problem(problem: FusedLinearProblem) -> gated_act.GatedActProblem:
    """The activation after, on its own."""
    assert problem.activation is not None
    return gated_act.GatedActProblem(
        device=problem.device,
        dtype=problem.dtype,
        width=problem.results,
        activation=problem.activation,
    )


def bind_reference(
    problem: FusedLinearProblem,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> FusedLinear:
    """The reference: the references of the separate ops, one after the other."""
    norm = activate = None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        norm = rms_norm.bind_norm(norm_problem(problem), norm_weight_I)
    if problem.activation is not None:
        activate = gated_act.bind_reference(activation_problem(problem))
    plain = linear.LinearProblem(
        device=problem.device,
        dtype=problem.dtype,
        inputs=problem.inputs,
        outputs=problem.outputs,
        bias=problem.bias,
    )
    gemm = linear.bind_reference(plain, weight_OI, bias_O)

    def fused_linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        y = gemm(x_TI if norm is None else norm(x_TI))
        if activate is not None:
            y = activate(y)
        if not problem.add:
            return y
        assert residual_TY is not None
        return residual_TY.add_(y)

    return fused_linear


def _sample(problem: FusedLinearProblem) -> Sample:
    """One token, the case that is fused on every device, and more; all inputs, some outputs."""
    problem = replace(
        problem,
        outputs=2 * linear.checked_size(problem.results)
        if problem.activation
        else linear.checked_size(problem.outputs),
    )
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_tensor(problem.outputs, problem.inputs, **new) / problem.inputs**0.5
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    norm_weight = None
    if problem.eps is not None:
        norm_weight = random_tensor(problem.inputs, **{**new, "dtype": torch.float32})

    def arguments(rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        residual = random_tensor(rows, problem.results, **new) if problem.add else None
        return random_tensor(rows, problem.inputs, **new), residual

    return Sample(
        problem=problem,
        weights=(weight, bias, norm_weight),
        arguments=arguments(1),
        further=tuple(arguments(rows) for rows in MORE_ROWS),
    )


OP: Op[FusedLinearProblem] = Op(
    name="fused_linear",
    reference=Kernel(
        name="separate ops", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.fused_linear.native:KERNEL",
        "headrace.back.kernels.fused_linear.triton_fused_linear:KERNEL",
        "headrace.back.kernels.fused_linear.triton_fixed:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
