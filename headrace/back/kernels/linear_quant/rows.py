"""Rows of activations quantized to int8: what GEMMs with quantized weights multiply by. They make
them of their x, or take them from the norm before (kernels/rms_norm_quant), which has x in the
first-level cache.

Quantized values are symmetric: value = round(x * 127 / m), ties to even, with m the largest
magnitude of the token, or of each `group` inputs of it. Magnitudes below 1e-30 count as 0; a NaN or
Inf makes the scale NaN. Or all tokens have one scale (FixedScale). T tokens, I inputs, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

HALF = 16
"""Inputs of a group whose quantized values are summed apart from the others'."""
TILE = 64
"""Inputs of a row without groups are padded to a multiple of it."""


class QuantizedRows(NamedTuple):
    """values_TP int8, zeros from input I up to whole groups (without groups: to a multiple of
    TILE); scales_TG float32; sums of quantized values int32: [T, G, 2], of the first HALF inputs of
    each group and of the others; without groups [T, 1, 1]."""

    values_TP: torch.Tensor
    scales_TG: torch.Tensor
    sums_TGS: torch.Tensor


class FixedScale(NamedTuple):
    """That of all tokens, held by the checkpoint: value = round(x / scale + zero), and what is
    beyond -128 .. 127 becomes the smallest or the largest integer."""

    scale: float
    zero: int = 0


def padded_inputs(inputs: int, group: int | None) -> int:
    """P of QuantizedRows."""
    unit = group or TILE
    return -(-inputs // unit) * unit


def checked(x: torch.Tensor | QuantizedRows, *, padded: int) -> QuantizedRows:
    """The rows, laid out as native GEMMs read them."""
    assert isinstance(x, QuantizedRows) and x.values_TP.shape[1] == padded, x
    assert x.values_TP.stride(1) == 1
    assert x.scales_TG.is_contiguous() and x.sums_TGS.is_contiguous()
    return x


def quantize_activations(x_TI: torch.Tensor, *, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values (float64 [T, I]) and scales (float32 [T, G]), one for each `group`
    inputs."""
    tokens, inputs = x_TI.shape
    padded = torch.nn.functional.pad(x_TI.float(), (0, -inputs % group)).view(tokens, -1, group)
    lost = ~padded.isfinite().all(-1, keepdim=True)
    padded = padded.masked_fill(lost, 0)
    top = padded.abs().amax(-1, keepdim=True)
    # A number divided by a tensor is its reciprocal's product to torch: rounded twice.
    inverse = torch.where(top > 1e-30, top.new_full((), 127.0) / top, 0)
    quantized = (padded * inverse).round().view(tokens, -1)[:, :inputs]
    return quantized.double(), (top / 127.0).masked_fill(lost, torch.nan)[..., 0]


def quantize_fixed(x_TI: torch.Tensor, fixed: FixedScale) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values (float64 [T, I]), their zero point in them, and scales (float32 [T, 1])."""
    lost = ~x_TI.isfinite().all(1, keepdim=True)
    x_TI = x_TI.float().masked_fill(~x_TI.isfinite(), 0)
    scale = x_TI.new_full((1, 1), fixed.scale)
    quantized = (x_TI / scale + fixed.zero).clamp(-128, 127).round()
    return quantized.double(), scale.expand(*lost.shape).masked_fill(lost, torch.nan)


def quantize_rows(
    x_TI: torch.Tensor, group: int | None, fixed: FixedScale | None = None
) -> QuantizedRows:
    """The definition. `group` None: one scale a token."""
    tokens, inputs = x_TI.shape
    if fixed is None:
        quantized, scales = quantize_activations(x_TI, group=group or inputs)
    else:
        assert group is None, group
        quantized, scales = quantize_fixed(x_TI, fixed)
    padded = torch.nn.functional.pad(quantized, (0, padded_inputs(inputs, group) - inputs))
    if group is None:
        sums = padded.sum(1)[:, None, None]
    else:
        groups = padded.view(tokens, -1, group)
        sums = torch.stack((groups[..., :HALF].sum(2), groups[..., HALF:].sum(2)), 2)
    return QuantizedRows(padded.to(torch.int8), scales, sums.to(torch.int32))


def quantized_activations(
    x: torch.Tensor | QuantizedRows,
    *,
    inputs: int,
    group: int | None,
    fixed: FixedScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values (float64 [T, I]) without a zero point and scales (float32 [T, G]) of plain
    rows, or of rows that are quantized already."""
    zero = 0 if fixed is None else fixed.zero
    if isinstance(x, QuantizedRows):
        return x.values_TP[:, :inputs].double() - zero, x.scales_TG
    if fixed is None:
        return quantize_activations(x, group=group or inputs)
    quantized, scales = quantize_fixed(x, fixed)
    return quantized - zero, scales
