"""y = x W^T + b with block-quantized weights and activations quantized on the way to int8, a group
of inputs at a time.

`bind(problem, weight, bias_O | None)` returns `f(x_TI) -> y_TO`; the weight is read in place.
Activations are quantized as for int8 weights (linear_quant/rows.py), but each `x_group` inputs of a
token with a scale of their own, here or (`quantized_rows`) before: 32, or as many as share one of
the weight's. All segments of a weight agree on that. Products of quantized values are summed
exactly within a part; scales and the sum over parts are float32. A NaN or Inf in x makes all
outputs of its token NaN, and of no other. T tokens, I inputs, O outputs.

Many rows of x (`plain_from`) are not quantized at all: the weight's values, rounded to the dtype of
x, are multiplied by them and summed in float32. That is nearer to the GEMM with the weight, but a
row's bits then depend on how many are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act.op import gated
from headrace.back.kernels.linear.op import FURTHER_ROWS
from headrace.back.kernels.linear_blocks.layout import (
    GROUP,
    LAYOUTS,
    PANEL,
    BlockLayout,
    BlockWeight,
    Segment,
    dequantize_rows,
    empty_segment,
    read_rows,
)
from headrace.back.kernels.linear_quant.rows import (
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

Linear = Callable[[torch.Tensor | QuantizedRows], torch.Tensor]
_ROWS = 1024
_MANY_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class LinearBlocksProblem:
    """`kinds`: (name of the layout, outputs) of each segment. `wide`: the result is float32, and
    there is no bias. `activation`: the first half of the outputs gates the second
    (kernels/gated_act), in float32: y has half as many. `quantized_rows`: x is QuantizedRows, made
    of rows of this dtype. `plain_from`: from so many rows on x is plain, also if `quantized_rows`,
    and the GEMM is that of many rows; None: never."""

    device: str
    dtype: torch.dtype
    inputs: int
    kinds: tuple[tuple[str, int], ...]
    bias: bool = False
    wide: bool = False
    activation: str | None = None
    quantized_rows: bool = False
    plain_from: int | None = None

    @property
    def outputs(self) -> int:
        """Of the weight."""
        return sum(size for _, size in self.kinds)

    @property
    def results(self) -> int:
        """Outputs of y."""
        return self.outputs if self.activation is None else self.outputs // 2


def many_rows(weight: BlockWeight) -> int | None:
    """`plain_from` of layers: where up to 32 inputs share a scale, dequantizing is won back from 32
    to 64 rows on, and 512 rows take 0.37 to 0.58 of the time; with 64 it is 0.9 of it, with 128 as
    much (Xeon, AMX; benchmarks/cpu)."""
    return _MANY_ROWS if weight.x_group == GROUP else None


def bind_reference(
    problem: LinearBlocksProblem, weight: BlockWeight, bias_O: torch.Tensor | None
) -> Linear:
    """The definition, some outputs at a time; products of quantized values in float64 are exact."""

    def linear(x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        dtype = problem.dtype if isinstance(x, QuantizedRows) else x.dtype
        gemm = _rows_gemm(problem, x, weight.x_group)
        parts = [
            gemm(segment, torch.arange(row, min(row + _ROWS, segment.outputs)))
            for segment in weight.segments
            for row in range(0, segment.outputs, _ROWS)
        ]
        y_TO = torch.cat(parts, 1)
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        y_TO = y_TO if problem.activation is None else gated(y_TO, problem.activation)
        return y_TO if problem.wide else y_TO.to(dtype)

    return linear


def _rows_gemm(
    problem: LinearBlocksProblem, x: torch.Tensor | QuantizedRows, x_group: int
) -> Callable[[Segment, torch.Tensor], torch.Tensor]:
    """(segment, rows of it) -> the GEMMs of x with them, float32."""
    if is_plain(problem, x):
        assert isinstance(x, torch.Tensor), problem
        wide = x.double()
        return lambda segment, rows: _dequantized_gemm(segment, rows, wide, problem.dtype)
    quantized, scales = quantized_activations(x, inputs=problem.inputs, group=x_group)
    return lambda segment, rows: _gemm(segment, rows, quantized, scales)


def is_plain(problem: LinearBlocksProblem, x: torch.Tensor | QuantizedRows) -> bool:
    """Whether these are the many rows that are multiplied as they are."""
    rows = len(x.values_TP) if isinstance(x, QuantizedRows) else len(x)
    return problem.plain_from is not None and rows >= problem.plain_from


def _dequantized_gemm(
    segment: Segment, rows: torch.Tensor, x_TI: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return (x_TI @ dequantize_rows(segment, rows).to(dtype).double().T).float()


def _gemm(
    segment: Segment, rows: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    weight_quantized, weight_scales, minima = read_rows(segment, rows)
    part = segment.layout.part
    y_TO = torch.zeros(len(quantized), len(rows))
    for i in range(weight_scales.shape[1]):
        cut = slice(i * part, (i + 1) * part)
        scale_T1 = scales[:, i * part // segment.layout.x_group, None]
        dots = (quantized[:, cut] @ weight_quantized[:, cut].double().T).float()
        y_TO += dots * (scale_T1 * weight_scales[:, i])
        if minima is not None:
            y_TO -= quantized[:, cut].sum(1, keepdim=True).float() * scale_T1 * minima[:, i]
    return y_TO


def _sample(problem: LinearBlocksProblem) -> Sample:
    unit = PANEL if problem.activation is None else 2 * PANEL
    problem = replace(
        problem,
        inputs=_slice(problem.inputs),
        kinds=tuple((name, min(size, unit + size % unit)) for name, size in problem.kinds),
    )
    generator = sample_generator()
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    weight = random_weight(problem, generator)
    if problem.plain_from is not None:  # few rows are those of the problem without it
        problem = replace(problem, plain_from=1)

    def rows(count: int) -> torch.Tensor | QuantizedRows:
        x_TI = random_tensor(count, problem.inputs, **new)
        plain = not problem.quantized_rows or is_plain(problem, x_TI)
        return x_TI if plain else quantize_rows(x_TI, weight.x_group)

    return Sample(
        problem=problem,
        weights=(weight, bias),
        arguments=(rows(5),),
        further=tuple((rows(count),) for count in FURTHER_ROWS),
    )


def _slice(inputs: int) -> int:
    """At most 1280 of the inputs, with the same remainder by a block's size: every group takes the
    same way, and the reference is slow."""
    return inputs if inputs < 1280 else 1024 + inputs % 256


def random_weight(problem: LinearBlocksProblem, generator: torch.Generator) -> BlockWeight:
    """Quantized values and multipliers over their whole range, scales in 0 .. 1 / 64."""
    segments = tuple(
        random_segment(LAYOUTS[name], size, problem.inputs, generator)
        for name, size in problem.kinds
    )
    return BlockWeight(problem.inputs, segments)


def random_segment(
    layout: BlockLayout, outputs: int, inputs: int, generator: torch.Generator
) -> Segment:
    """See random_weight. Outputs beyond the last are random too: no kernel may show them."""
    segment = empty_segment(layout, outputs, inputs)
    segment.panels.random_(0, 256, generator=generator)
    blocks = segment.panels.view(-1, layout.block_bytes)
    header = blocks[:, : layout.header_bytes].view(layout.dtype)
    header.copy_(torch.rand(header.shape, generator=generator) / 64)
    return segment


OP: Op[LinearBlocksProblem] = Op(
    name="linear_blocks",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.linear_blocks.native_dequantized:KERNEL",
        "headrace.back.kernels.linear_blocks.native:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
