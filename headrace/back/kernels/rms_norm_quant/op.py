"""Root mean square norm (kernels/rms_norm), with or without the residual's addition, straight to
rows quantized to int8.

`bind(problem, weight_E, fixed | None)` returns `f(x_TE, residual_TE | None) -> QuantizedRows`: what
a GEMM with quantized weights makes of the norm's result itself (linear_quant/rows.py), to the bit:
the result is rounded to the dtype before it is quantized. `fixed`: the scale of all rows. With a
residual x is added into it in place, and the sum is normed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.linear_quant.rows import FixedScale, QuantizedRows, quantize_rows
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rms_norm.op import RMSNormProblem, bind_add_norm, bind_norm

QuantizedNorm = Callable[[torch.Tensor, torch.Tensor | None], QuantizedRows]


@dataclass(frozen=True, kw_only=True)
class RMSNormQuantProblem:
    """`dtype` is that of x and the residual; the weight is float32. `group`: inputs that share a
    scale, None: all. `fixed`: all rows have one, which is given; without groups only."""

    device: str
    dtype: torch.dtype
    width: int
    eps: float
    group: int | None
    fixed: bool = False


def bind_reference(
    problem: RMSNormQuantProblem, weight_E: torch.Tensor, fixed: FixedScale | None = None
) -> QuantizedNorm:
    """The references of the norm and of the GEMMs' quantization, one after the other."""
    plain = RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.width, eps=problem.eps
    )
    norm, add_norm = bind_norm(plain, weight_E), bind_add_norm(plain, weight_E)

    def quantized_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor | None) -> QuantizedRows:
        y_TE = norm(x_TE) if residual_TE is None else add_norm(x_TE, residual_TE)
        return quantize_rows(y_TE, problem.group, fixed)

    return quantized_norm


def _sample(problem: RMSNormQuantProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_tensor(problem.width, **{**new, "dtype": torch.float32})
    x_TE, residual_TE = (random_tensor(3, problem.width, **new) for _ in range(2))
    fixed = FixedScale(1 / 32, -9) if problem.fixed else None
    return Sample(problem=problem, weights=(weight, fixed), arguments=(x_TE, residual_TE))


OP: Op[RMSNormQuantProblem] = Op(
    name="rms_norm_quant",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.rms_norm_quant.native:KERNEL",),
    sample=_sample,
    # A value half-way between two integers may be rounded to either.
    tolerance=lambda problem: max(float_tolerance(problem.dtype), 0.01),
)
