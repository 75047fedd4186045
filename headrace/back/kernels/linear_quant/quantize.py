"""A plain weight into packed panels by the native kernel: to the bit what the scheme and
`write_panels` give."""

from __future__ import annotations

import torch

from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.kernels.native.library import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.parallel.bundle import FP8, INT8


def quantize_with(library: NativeLibrary, weight_OI: torch.Tensor, packed: PackedWeight) -> None:
    """Fills all panels of `packed` by one library."""
    assert weight_OI.shape == (packed.outputs, packed.inputs) and weight_OI.stride(1) == 1
    assert packed.panels.is_contiguous()
    name = "quantize" if packed.form == INT8 else "quantize_fp8"
    kernel = library.bind(name, POINTER, POINTER, *(INT64,) * 3, INT32)
    kernel(
        weight_OI.data_ptr(), packed.panels.data_ptr(), packed.outputs, packed.inputs, weight_OI.stride(0),
        DTYPES[weight_OI.dtype],
    )  # fmt: skip


def quantize(weight_OI: torch.Tensor, packed: PackedWeight) -> bool:
    """Fills all panels if there is a kernel for the weight; False if there is none."""
    if packed.form not in (INT8, FP8):
        return False
    if unsupported(weight_OI.device.type, weight_OI.dtype) or weight_OI.stride(1) != 1:
        return False
    quantize_with(loaded(), weight_OI, packed)
    return True
