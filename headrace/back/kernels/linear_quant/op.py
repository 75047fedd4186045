"""y = x W^T + b with packed weights of a byte and a scale per output (float32).

`bind(problem, weight, bias_O | None)` returns `f(x_TI) -> y_TO`; the weight is read in place. T tokens, I inputs, O
outputs.

    int8    activations are quantized on the way to int8 (rows.py); with `coded` x is CodedRows already. Products of
            codes are summed exactly. A NaN or Inf in x makes all outputs of its token NaN, and of no other
    fp8     activations stay as they are; their products with e4m3 numbers are summed in float32, and the sum is scaled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act.op import gated
from headrace.back.kernels.linear_quant.layout import (
    PANEL,
    PackedWeight,
    empty,
    read_rows,
    values_of,
    write_panels,
)
from headrace.back.kernels.linear_quant.rows import CodedRows, activation_codes, coded_rows
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

Linear = Callable[[torch.Tensor | CodedRows], torch.Tensor]
_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class LinearQuantProblem:
    """`coding` is the weight's (layout.py). `wide`: y is float32 whatever the dtype of x (logits); without a bias only.
    `activation`: the first half of the outputs gates the second (kernels/gated_act), in float32: y has half as many.
    `coded`: x is CodedRows, made of rows of this dtype."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    coding: str = "int8"
    bias: bool = False
    wide: bool = False
    activation: str | None = None
    coded: bool = False

    @property
    def results(self) -> int:
        """Outputs of y."""
        return self.outputs if self.activation is None else self.outputs // 2


def bind_reference(
    problem: LinearQuantProblem, weight: PackedWeight, bias_O: torch.Tensor | None
) -> Linear:
    """The definition, some outputs at a time; products of codes in float64 are exact."""

    def linear(x: torch.Tensor | CodedRows) -> torch.Tensor:
        codes, scales = _multipliers(problem, x)
        dtype = problem.dtype if isinstance(x, CodedRows) else x.dtype
        parts = [
            _product(weight, torch.arange(row, min(row + _ROWS, problem.outputs)), codes, scales)
            for row in range(0, problem.outputs, _ROWS)
        ]
        y_TO = torch.cat(parts, 1)
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        y_TO = y_TO if problem.activation is None else gated(y_TO, problem.activation)
        return y_TO if problem.wide else y_TO.to(dtype)

    return linear


def _multipliers(
    problem: LinearQuantProblem, x: torch.Tensor | CodedRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes of weights are multiplied by (float64 [T, I]), and scales (float32 [T, 1])."""
    if problem.coding == "int8":
        return activation_codes(x, inputs=problem.inputs, group=None)
    assert isinstance(x, torch.Tensor), problem
    return x.double(), torch.ones(len(x), 1)


def _product(
    weight: PackedWeight, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    weight_codes, weight_scales = read_rows(weight, rows)
    dots = (codes @ values_of(weight, weight_codes).double().T).float()
    return dots * (scales * weight_scales.T)


def _sample(problem: LinearQuantProblem) -> Sample:
    unit = PANEL if problem.activation is None else 2 * PANEL
    problem = replace(
        problem,
        inputs=_checked_size(problem.inputs),
        outputs=min(problem.outputs, unit + problem.outputs % unit),
    )
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    weight, x_TI = random_weight(problem, generator), random_tensor(3, problem.inputs, **new)
    x = coded_rows(x_TI, None) if problem.coded else x_TI
    return Sample(problem=problem, weights=(weight, bias), arguments=(x,))


def random_weight(problem: LinearQuantProblem, generator: torch.Generator) -> PackedWeight:
    """A packed weight with codes over their whole range."""
    shape = (problem.outputs, problem.inputs)
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    if problem.coding == "fp8":  # the bits of sign and magnitude, 0 .. 126: NaN is not among them
        codes = (codes.abs() - 1).clamp_(min=0) | (codes & -128)
    scales = torch.rand(problem.outputs, 1, generator=generator) / 128
    weight = empty(*shape, problem.coding)
    write_panels(weight, 0, codes, scales)
    return weight


def _checked_size(size: int) -> int:
    """A size of at most 512 with the same remainder by every power of two up to 256."""
    return size if size <= 512 else 256 + size % 256


OP: Op[LinearQuantProblem] = Op(
    name="linear_quant",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_quant.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
