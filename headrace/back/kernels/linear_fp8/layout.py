"""Weights and activations of e4m3 numbers as GPUs read them: plain rows, with scales beside them.

O outputs, I inputs, T tokens, G groups of neighbouring inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

FLOAT8 = torch.float8_e4m3fn
MOST = 448.0
"""The largest e4m3 number."""


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """values_OI (e4m3) times scales_OG (float32, contiguous). `group` inputs of an output share a
    scale, None: all of them, and G is 1. A scale that a tensor or a block of outputs shares is
    repeated for each output."""

    values_OI: torch.Tensor
    scales_OG: torch.Tensor
    group: int | None

    @property
    def outputs(self) -> int:
        """O."""
        return self.values_OI.shape[0]

    @property
    def inputs(self) -> int:
        """I."""
        return self.values_OI.shape[1]

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.values_OI.nbytes + self.scales_OG.nbytes


def dequantize(weight: Fp8Weight) -> torch.Tensor:
    """float32 [O, I]."""
    scales = weight.scales_OG
    if weight.group is not None:
        scales = scales.repeat_interleave(weight.group, 1)[:, : weight.inputs]
    return weight.values_OI.float() * scales


class Fp8Rows(NamedTuple):
    """Activations: values_TI e4m3, scales_TG float32."""

    values_TI: torch.Tensor
    scales_TG: torch.Tensor


def quantize_rows(x_TI: torch.Tensor, group: int | None) -> Fp8Rows:
    """The definition: the largest magnitude of a token, or of each `group` inputs of it, becomes
    448; the nearest numbers, ties to even. Magnitudes below 1e-30 count as 0."""
    tokens, inputs = x_TI.shape
    wide = group or inputs
    padded = torch.nn.functional.pad(x_TI.float(), (0, -inputs % wide)).view(tokens, -1, wide)
    top = padded.abs().amax(-1, keepdim=True)
    # A number divided by a tensor is its reciprocal's product to torch: rounded twice.
    inverse = torch.where(top > 1e-30, top.new_tensor(MOST) / top, 0)
    values = (padded * inverse).clamp(-MOST, MOST).view(tokens, -1)[:, :inputs]
    return Fp8Rows(values.to(FLOAT8), (top / MOST)[..., 0])


def dequantize_rows(rows: Fp8Rows, group: int | None) -> torch.Tensor:
    """float32 [T, I]."""
    return dequantize(Fp8Weight(rows.values_TI, rows.scales_TG, group))
