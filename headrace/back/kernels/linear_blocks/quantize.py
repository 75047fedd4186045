"""A plain weight into panels of a layout made online: to the bit what the scheme and
`write_quantized` give."""

from __future__ import annotations

import torch

from headrace.back.kernels.linear_blocks.layout import Segment
from headrace.back.kernels.native.library import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)


def quantize_with(library: NativeLibrary, weight_OI: torch.Tensor, segment: Segment) -> None:
    """Fills all panels of `segment` by one library."""
    assert weight_OI.shape == (segment.outputs, segment.inputs) and weight_OI.stride(1) == 1
    assert segment.panels.is_contiguous()
    kernel = library.bind("quantize_blocks", POINTER, POINTER, *(INT64,) * 4, INT32)
    kernel(
        weight_OI.data_ptr(), segment.panels.data_ptr(), *weight_OI.shape, weight_OI.stride(0),
        segment.layout.number, DTYPES[weight_OI.dtype],
    )  # fmt: skip


def quantize_blocks(weight_OI: torch.Tensor, segment: Segment) -> bool:
    """Fills all panels if there is a kernel for the weight; False if there is none."""
    if unsupported(weight_OI.device.type, weight_OI.dtype) or weight_OI.stride(1) != 1:
        return False
    quantize_with(loaded(), weight_OI, segment)
    return True
