"""y = x W^T + b with packed int8 weights, a scale per output, and activations quantized on the way to int8.

`bind(problem, weight, bias_O | None)` returns `f(x_TI) -> y_TO`; the weight is read in place. Activations are
symmetric: code = round(x * 127 / m), ties to even, with m the largest magnitude of the token. Products of codes
are summed exactly; scales are float32. A NaN or Inf in x makes all outputs of its token NaN, and of no other.
Magnitudes below 1e-30 count as 0. T tokens, I inputs, O outputs.
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
    write_panels,
)
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

Linear = Callable[[torch.Tensor], torch.Tensor]
_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class LinearQuantProblem:
    """`wide`: y is float32 whatever the dtype of x (logits); without a bias only. `activation`: the first half of the
    outputs gates the second (kernels/gated_act), in float32: y has half as many."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool = False
    wide: bool = False
    activation: str | None = None

    @property
    def results(self) -> int:
        """Outputs of y."""
        return self.outputs if self.activation is None else self.outputs // 2


def quantize_activations(x_TI: torch.Tensor, *, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (float64 [T, I]) and scales (float32 [T, G]), one for each `group` inputs."""
    tokens, inputs = x_TI.shape
    padded = torch.nn.functional.pad(x_TI.float(), (0, -inputs % group)).view(tokens, -1, group)
    lost = ~padded.isfinite().all(-1, keepdim=True)
    padded = padded.masked_fill(lost, 0)
    top = padded.abs().amax(-1, keepdim=True)
    # A number divided by a tensor is its reciprocal's product to torch: rounded twice.
    inverse = torch.where(top > 1e-30, top.new_tensor(127.0) / top, 0)
    codes = (padded * inverse).round().view(tokens, -1)[:, :inputs]
    return codes.double(), (top / 127.0).masked_fill(lost, torch.nan)[..., 0]


def bind_reference(
    problem: LinearQuantProblem, weight: PackedWeight, bias_O: torch.Tensor | None
) -> Linear:
    """The definition, some outputs at a time; products of codes in float64 are exact."""

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_activations(x_TI, group=problem.inputs)
        parts = [
            _product(weight, torch.arange(row, min(row + _ROWS, problem.outputs)), codes, scales)
            for row in range(0, problem.outputs, _ROWS)
        ]
        y_TO = torch.cat(parts, 1)
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        y_TO = y_TO if problem.activation is None else gated(y_TO, problem.activation)
        return y_TO if problem.wide else y_TO.to(x_TI.dtype)

    return linear


def _product(
    weight: PackedWeight, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    weight_codes, weight_scales = read_rows(weight, rows)
    dots = (codes @ weight_codes.double().T).float()
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
    return Sample(
        problem=problem,
        weights=(random_weight(problem, generator), bias),
        arguments=(random_tensor(3, problem.inputs, **new),),
    )


def random_weight(problem: LinearQuantProblem, generator: torch.Generator) -> PackedWeight:
    """A packed weight with codes over their whole range."""
    shape = (problem.outputs, problem.inputs)
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scales = torch.rand(problem.outputs, 1, generator=generator) / 128
    weight = empty(*shape)
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
