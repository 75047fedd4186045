"""Root mean square norm over the last dimension: y = x / sqrt(mean(x^2) + eps) * w (Zhang &
Sennrich 2019, eq. 4).

Two ops. `rms_norm`: `f(x) -> y` for x [..., E]; the last dimension is contiguous, the leading ones
may be strided (a view into a merged projection). `add_rms_norm`: `f(x_TE, residual_TE) -> y_TE`
adds x into `residual` in place and norms the sum. `bind(problem, weight_E)`: the weight is float32
with Gemma's 1 already added. Statistics and product are float32, the result is cast once.
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
class RMSNormProblem:
    """`dtype` is that of x, y and the residual; the weight is float32."""

    device: str
    dtype: torch.dtype
    width: int
    eps: float


def _norm(x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight_E).to(x.dtype)


def bind_norm(problem: RMSNormProblem, weight_E: torch.Tensor) -> Norm:
    """The reference of `rms_norm`."""
    assert weight_E.dtype == torch.float32, weight_E.dtype

    def norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(x, weight_E, problem.eps)

    return norm


def bind_add_norm(problem: RMSNormProblem, weight_E: torch.Tensor) -> AddNorm:
    """The reference of `add_rms_norm`."""
    assert weight_E.dtype == torch.float32, weight_E.dtype

    def add_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        residual_TE += x_TE
        return _norm(residual_TE, weight_E, problem.eps)

    return add_norm


def _inputs(problem: RMSNormProblem, count: int) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_tensor(problem.width, **{**new, "dtype": torch.float32})
    return Sample(
        problem=problem,
        weights=(weight,),
        arguments=tuple(random_tensor(3, problem.width, **new) for _ in range(count)),
    )


OP: Op[RMSNormProblem] = Op(
    name="rms_norm",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_norm),
    kernels=(
        "headrace.back.kernels.rms_norm.native:KERNEL",
        "headrace.back.kernels.rms_norm.triton_rms_norm:KERNEL",
    ),
    sample=lambda problem: _inputs(problem, 1),
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

ADD_OP: Op[RMSNormProblem] = Op(
    name="add_rms_norm",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_add_norm),
    kernels=(
        "headrace.back.kernels.rms_norm.native:ADD_KERNEL",
        "headrace.back.kernels.rms_norm.triton_rms_norm:ADD_KERNEL",
    ),
    sample=lambda problem: _inputs(problem, 2),
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
