"""y = x W^T + b with packed weights of a byte and a scale per output (float32), or, of e4m3
numbers, per output and group of inputs.

`bind(problem, weight, bias_O | None)` returns `f(x_TI) -> y_TO`; the weight is read in place. T
tokens, I inputs, O outputs.

    int8    activations are quantized on the way to int8 (rows.py); with `quantized_rows` x is
            QuantizedRows already. GEMMs of
            quantized values are summed exactly. A NaN or Inf in x makes all outputs of its token
            NaN, and of no other. `fixed`: all tokens have one scale, held with the weight, and
            perhaps a zero point
    fp8     activations stay as they are; their GEMMs with e4m3 numbers are summed in float32, and
            the sum (of a group) is scaled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act.op import gated
from headrace.back.kernels.linear.op import FURTHER_ROWS
from headrace.back.kernels.linear_quant.layout import (
    PANEL,
    PackedWeight,
    empty,
    read_rows,
    values_of,
    with_fixed,
    write_panels,
)
from headrace.back.kernels.linear_quant.rows import (
    FixedScale,
    QuantizedRows,
    quantize_rows,
    quantized_activations,
)
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.parallel.bundle import INT8, Number, WeightForm

Linear = Callable[[torch.Tensor | QuantizedRows], torch.Tensor]
_ROWS = 1024
SAMPLE_SCALE = FixedScale(1 / 32, -9)
"""Of the weights that self-checks multiply by: some tokens' values lie beyond its range."""


@dataclass(frozen=True, kw_only=True)
class LinearQuantProblem:
    """`form` is the weight's (layout.py). `wide`: y is float32 whatever the dtype of x (logits);
    without a bias only. `activation`: the first half of the outputs gates the second
    (kernels/gated_act), in float32: y has half as many. `quantized_rows`: x is QuantizedRows, made
    of rows of this dtype."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    form: WeightForm = INT8
    bias: bool = False
    wide: bool = False
    activation: str | None = None
    quantized_rows: bool = False
    fixed: bool = False

    @property
    def results(self) -> int:
        """Outputs of y."""
        return self.outputs if self.activation is None else self.outputs // 2


def bind_reference(
    problem: LinearQuantProblem, weight: PackedWeight, bias_O: torch.Tensor | None
) -> Linear:
    """The definition, some outputs at a time; products of quantized values in float64 are exact."""

    def linear(x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        quantized, scales = _multipliers(problem, x, weight.fixed)
        dtype = problem.dtype if isinstance(x, QuantizedRows) else x.dtype
        parts = [
            _gemm(weight, torch.arange(row, min(row + _ROWS, problem.outputs)), quantized, scales)
            for row in range(0, problem.outputs, _ROWS)
        ]
        y_TO = torch.cat(parts, 1)
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        y_TO = y_TO if problem.activation is None else gated(y_TO, problem.activation)
        return y_TO if problem.wide else y_TO.to(dtype)

    return linear


def _multipliers(
    problem: LinearQuantProblem, x: torch.Tensor | QuantizedRows, fixed: FixedScale | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What quantized values of weights are multiplied by (float64 [T, I]), and scales (float32 [T,
    1])."""
    if problem.form == INT8:
        return quantized_activations(x, inputs=problem.inputs, group=None, fixed=fixed)
    assert isinstance(x, torch.Tensor), problem
    return x.double(), torch.ones(len(x), 1)


def _gemm(
    weight: PackedWeight, rows: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    weight_quantized, weight_scales = read_rows(weight, rows)
    values, total = values_of(weight, weight_quantized).double(), 0
    size = weight.form.group[1] or weight.inputs
    for i, scales_N in enumerate(weight_scales.T):
        part = slice(i * size, (i + 1) * size)
        total = total + (quantized[:, part] @ values[:, part].T).float() * (scales * scales_N)
    return total


def _sample(problem: LinearQuantProblem) -> Sample:
    unit = PANEL if problem.activation is None else 2 * PANEL
    problem = replace(
        problem,
        outputs=min(problem.outputs, unit + problem.outputs % unit),
    )
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    weight = random_weight(problem, generator)

    def rows(count: int) -> torch.Tensor | QuantizedRows:
        x_TI = random_tensor(count, problem.inputs, **new)
        return quantize_rows(x_TI, None, weight.fixed) if problem.quantized_rows else x_TI

    return Sample(
        problem=problem,
        weights=(weight, bias),
        arguments=(rows(3),),
        further=tuple((rows(count),) for count in FURTHER_ROWS),
    )


def random_weight(problem: LinearQuantProblem, generator: torch.Generator) -> PackedWeight:
    """A packed weight with quantized values over their whole range."""
    shape = (problem.outputs, problem.inputs)
    quantized = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    if (
        problem.form.number is Number.FLOAT8_E4M3
    ):  # the bits of sign and magnitude, 0 .. 126: NaN is not among them
        quantized = (quantized.abs() - 1).clamp_(min=0) | (quantized & -128)
    groups = -(-problem.inputs // (problem.form.group[1] or problem.inputs))
    scales = torch.rand(problem.outputs, groups, generator=generator) / 128
    weight = empty(*shape, problem.form)
    write_panels(weight, 0, quantized, scales)
    return with_fixed(weight, quantized, SAMPLE_SCALE) if problem.fixed else weight


OP: Op[LinearQuantProblem] = Op(
    name="linear_quant",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_quant.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
