"""Layer norm over the last dimension: y = (x - mean) / sqrt(variance + eps) * w + b (Ba et al.
2016, section 3).

Two ops. `layer_norm`: `f(x) -> y` for x [..., E], or [T, H, E] where each of `heads` H has a weight
of its own; the last dimension is contiguous, the leading ones may be strided (a view into a merged
projection). `add_layer_norm`: `f(x_TE, residual_TE) -> y_TE` adds x into `residual` in place and
norms the sum. `bind(problem, weight_HE, bias_E)`: both float32, with an offset of 1 already added;
the bias may be None. Statistics and product are float32, the result is cast once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

Norm = Callable[[torch.Tensor], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerNormProblem:
    """`dtype` is that of x, y and the residual. `heads`: rows of the weight; row h norms x[..., h,
    :]."""

    device: str
    dtype: torch.dtype
    width: int
    eps: float
    bias: bool
    heads: int = 1


def _norm(
    x: torch.Tensor, weight_HE: torch.Tensor, bias_E: torch.Tensor | None, eps: float
) -> torch.Tensor:
    centred = x.float() - x.float().mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = centred * scale * (weight_HE if weight_HE.shape[0] > 1 else weight_HE[0])
    return (y if bias_E is None else y + bias_E).to(x.dtype)


def bind_norm(
    problem: LayerNormProblem, weight_HE: torch.Tensor, bias_E: torch.Tensor | None
) -> Norm:
    """The reference of `layer_norm`."""
    check_weights(problem, weight_HE, bias_E)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(x, weight_HE, bias_E, problem.eps)

    return norm


def bind_add_norm(
    problem: LayerNormProblem, weight_HE: torch.Tensor, bias_E: torch.Tensor | None
) -> AddNorm:
    """The reference of `add_layer_norm`."""
    check_weights(problem, weight_HE, bias_E)

    def add_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        residual_TE += x_TE
        return _norm(residual_TE, weight_HE, bias_E, problem.eps)

    return add_norm


def check_weights(
    problem: LayerNormProblem, weight_HE: torch.Tensor, bias_E: torch.Tensor | None
) -> None:
    """Asserts that the weights are those of the problem."""
    shape = (problem.heads, problem.width)
    assert weight_HE.dtype == torch.float32 and weight_HE.shape == shape, weight_HE.shape
    assert problem.bias == (bias_E is not None), problem
    assert bias_E is None or bias_E.dtype == torch.float32, bias_E.dtype


def _inputs(problem: LayerNormProblem, count: int) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight, bias = (
        random_tensor(rows, problem.width, **{**new, "dtype": torch.float32})
        for rows in (problem.heads, 1)
    )
    shape = (3, problem.width) if problem.heads == 1 else (3, problem.heads, problem.width)
    return Sample(
        problem=problem,
        weights=(weight, bias[0] if problem.bias else None),
        arguments=tuple(2 + random_tensor(*shape, **new) for _ in range(count)),
    )


OP: Op[LayerNormProblem] = Op(
    name="layer_norm",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_norm, invariant=True),
    kernels=(
        "headrace.back.kernels.layer_norm.native:KERNEL",
        "headrace.back.kernels.layer_norm.triton_layer_norm:KERNEL",
    ),
    sample=lambda problem: _inputs(problem, 1),
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

ADD_OP: Op[LayerNormProblem] = Op(
    name="add_layer_norm",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_add_norm, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.layer_norm.native:ADD_KERNEL",
        "headrace.back.kernels.layer_norm.triton_layer_norm:ADD_KERNEL",
    ),
    sample=lambda problem: _inputs(problem, 2),
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
