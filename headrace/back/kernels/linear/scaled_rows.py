"""Activations of a byte on GPUs: e4m3 numbers or int8, with scales beside them."""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: 448.0, torch.int8: 127.0}
"""The number that the largest magnitude becomes."""


class ScaledRows(NamedTuple):
    """values_TI e4m3 or int8, scales_TG float32: for T tokens of I inputs in G groups."""

    values_TI: torch.Tensor
    scales_TG: torch.Tensor


def scaled_rows(
    x_TI: torch.Tensor,
    group: int | None,
    dtype: torch.dtype,
    scale_1: torch.Tensor | None = None,
    zero_1: torch.Tensor | None = None,
) -> ScaledRows:
    """The definition: the largest magnitude of a token, or of each `group` inputs of it, becomes
    the largest number; the nearest numbers, ties to even. Magnitudes below 1e-30 count as 0. A NaN
    or Inf makes the scale of int8 NaN; an e4m3 number may be NaN itself.

    scale_1: of all tokens; zero_1: what is added to their integers. Values beyond the range of both
    become the largest or the smallest number, of int8 -128."""
    tokens, inputs = x_TI.shape
    wide, most = group or inputs, LARGEST[dtype]
    padded = torch.nn.functional.pad(x_TI.float(), (0, -inputs % wide)).view(tokens, -1, wide)
    lost = torch.zeros(1, dtype=torch.bool, device=x_TI.device)
    if dtype is torch.int8:
        lost = ~padded.isfinite().all(-1, keepdim=True)
        padded = padded.masked_fill(lost, 0)
    top = padded.abs().amax(-1, keepdim=True)
    if scale_1 is not None:
        values = padded / scale_1 if zero_1 is None else padded / scale_1 + zero_1
        least = -128.0 if dtype is torch.int8 else -most
        values = values.clamp(least, most).view(tokens, -1)[:, :inputs]
        scales = scale_1.expand(*top.shape).masked_fill(lost, torch.nan)[..., 0]
        return ScaledRows(
            (values.round() if dtype is torch.int8 else values).to(dtype), scales.contiguous()
        )
    # Beside a number torch multiplies by reciprocals, here and below: two roundings.
    largest = top.new_full((), most)
    inverse = torch.where(top > 1e-30, largest / top, 0)
    values = (padded * inverse).clamp(-most, most).view(tokens, -1)[:, :inputs]
    values = values.round() if dtype is torch.int8 else values
    return ScaledRows(values.to(dtype), (top / largest).masked_fill(lost, torch.nan)[..., 0])
