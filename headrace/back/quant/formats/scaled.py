"""Weights of a byte, int8 or e4m3, with a scale for all, for each output, for each group of inputs,
or for each block of outputs x inputs; and bitsandbytes' int8."""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups
from headrace.base.config.quantized_tensors import QuantizedTensor


def scaled(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * scale, or (value - zero) * scale; the scale's shape says what shares it."""
    return shared(tensor, read, read("values", rows, columns), rows, columns)


def shared(
    tensor: QuantizedTensor, read: Read, values: torch.Tensor, rows: slice, columns: slice
) -> Groups:
    """Those values with the scales (and zero points) of their rows."""
    by_input = (tensor.numbers.group or (1, 0))[1]
    scales = _spread(tensor, read("scales"), rows)
    zeros = _spread(tensor, read("zeros"), rows) if "zeros" in tensor.members else None
    group = column_groups(columns, by_input, values.device) if scales.shape[1] > 1 else None
    return Groups(
        values_RC=values,
        scales_RG=scales,
        zeros_RG=zeros,
        group_C=group,
        inputs=_of_inputs(tensor, read, "inputs"),
        input_zero=_of_inputs(tensor, read, "input_zeros"),
    )


def _of_inputs(tensor: QuantizedTensor, read: Read, role: str) -> torch.Tensor | None:
    """The largest of a tensor's experts."""
    if role not in tensor.members:
        return None
    return read(role).float().reshape(-1).amax(0, keepdim=True)


def _spread(tensor: QuantizedTensor, scales: torch.Tensor, rows: slice) -> torch.Tensor:
    """A row of scales for each of the rows [R, G]; bytes are exponents of two (e8m0)."""
    by_output = (tensor.numbers.group or (1, 0))[0]
    scales = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    if scales.dim() == 4:
        scales = scales[:, 0, :, 0]
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.dim() == 1:
        scales = scales[:, None]
    if by_output == 0 or scales.shape[0] == 1:
        return scales.expand(rows.stop - rows.start, -1)
    section = tensor.shape[-2] // tensor.numbers.sections
    rows_R = torch.arange(rows.start, rows.stop, device=scales.device)
    of_section = scales.shape[0] // tensor.numbers.sections
    return scales[rows_R // section * of_section + rows_R % section // by_output]


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0: 2 ** (byte - 127); 255 is NaN (Open Compute, Microscaling Formats 1.0, 5.4.1)."""
    return exponents.view(torch.float8_e8m0fnu).float()


def bitsandbytes(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """int8 with the largest magnitude of each output: value / 127 * magnitude."""
    return Groups(
        values_RC=read("values", rows, columns),
        scales_RG=read("scales", rows).float()[:, None] / 127,
    )
