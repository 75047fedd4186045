"""A loaded weight as floats, some outputs at a time: for what is computed from weights beside
steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.back.kernels.linear_blocks import layout as blocks
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_fp8 import layout as fp8
from headrace.back.kernels.linear_fp8.layout import Fp8Weight
from headrace.back.kernels.linear_int4 import layout as int4
from headrace.back.kernels.linear_int4.layout import Int4Weight
from headrace.back.kernels.linear_int8 import layout as int8
from headrace.back.kernels.linear_int8.layout import Int8Weight
from headrace.back.kernels.linear_quant import layout as rows
from headrace.back.kernels.linear_quant.layout import PackedWeight

CHUNK = 1024
"""Outputs at a time, where they are not all unpacked at once."""
AnyWeight = torch.Tensor | PackedWeight | BlockWeight | Fp8Weight | Int8Weight | Int4Weight


def float_rows(weight: AnyWeight) -> Iterator[tuple[int, torch.Tensor]]:
    """(first output, float32 [N, I]) of all outputs in order."""
    if isinstance(weight, PackedWeight):
        for at_N in torch.arange(weight.outputs).split(CHUNK):
            yield int(at_N[0]), rows.dequantize_rows(weight, at_N)
    elif isinstance(weight, BlockWeight):
        first = 0
        for segment in weight.segments:
            for at_N in torch.arange(segment.outputs).split(CHUNK):
                yield first + int(at_N[0]), blocks.dequantize_rows(segment, at_N)
            first += segment.outputs
    elif isinstance(weight, torch.Tensor):
        for number, chunk_NI in enumerate(weight.split(CHUNK)):
            yield number * CHUNK, chunk_NI.float()
    elif isinstance(weight, Fp8Weight):
        yield 0, fp8.dequantize(weight)
    elif isinstance(weight, Int8Weight):
        yield 0, int8.dequantize(weight)
    else:
        yield 0, int4.dequantize(weight, torch.float32)
