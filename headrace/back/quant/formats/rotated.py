"""e2m1 numbers of a weight whose inputs were rotated first, in blocks: each is turned back, so that
inputs stay as they are.

Source: fp_quant 0.3 (Egiazarian et al. 2025, MR-GPTQ): the weight times a matrix, then MXFP4 or
NVFP4 over one scale for all. O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.quant.formats import floats4
from headrace.back.quant.formats.groups import Groups, Read
from headrace.base.config.quantized_tensors import QuantizedTensor


def nvfp4(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * scale / outer, scales as bytes of e4m3 numbers."""

    def read_e4m3(role: str, *cuts: slice) -> torch.Tensor:
        part = read(role, *cuts)
        return part.view(torch.float8_e4m3fn) if role == "scales" else part

    return _restored(
        tensor, read, columns, lambda cut: floats4.compressed(tensor, read_e4m3, rows, cut)
    )


def mxfp4(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * 2 ** (scale - 127) / outer."""
    groups = _restored(tensor, read, columns, lambda cut: floats4.powers(tensor, read, rows, cut))
    return Groups(values_RC=groups.values_RC / read("outer").float(), scales_RG=groups.scales_RG)


def plain(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Floats, rotated alike."""

    def floats(cut: slice) -> Groups:
        values = read("values", rows, cut).float()
        return Groups(values_RC=values, scales_RG=values.new_ones(1, 1))

    return _restored(tensor, read, columns, floats)


def _restored(
    tensor: QuantizedTensor, read: Read, columns: slice, rotated: Callable[[slice], Groups]
) -> Groups:
    """Of whole blocks what a rectangle needs: orthogonal matrices are turned back by their
    transpose."""
    matrix_HH = read("rotation").float()
    size = len(matrix_HH)
    blocks = slice(columns.start // size * size, -(-columns.stop // size) * size)
    values = rotated(blocks).dequantized().unflatten(1, (-1, size)) @ matrix_HH.t()
    first = columns.start - blocks.start
    part = values.flatten(1)[:, first : first + columns.stop - columns.start]
    return Groups(values_RC=part, scales_RG=part.new_ones(1, 1))
