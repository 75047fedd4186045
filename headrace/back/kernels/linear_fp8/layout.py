"""Weights and activations of e4m3 numbers as GPUs read them: plain rows, with scales beside them.

O outputs, I inputs, T tokens, G groups of neighbouring inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.linear.scaled_rows import FLOAT8, ScaledRows, scaled_rows


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """values_OI (e4m3) times scales_OG (float32, contiguous). `group` inputs of an output share a
    scale, None: all of them, and G is 1. A scale that a tensor or a block of outputs shares is
    repeated for each output. `input_scale_1` (float32): that of all tokens; None: each has its
    own."""

    values_OI: torch.Tensor
    scales_OG: torch.Tensor
    group: int | None
    input_scale_1: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """O."""
        return self.values_OI.shape[0]

    @property
    def inputs(self) -> int:
        """I."""
        return self.values_OI.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values_OI.device

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


def quantize_rows(
    x_TI: torch.Tensor, group: int | None, scale_1: torch.Tensor | None = None
) -> ScaledRows:
    """As kernels quantize tokens."""
    return scaled_rows(x_TI, group, FLOAT8, scale_1)


def dequantize_rows(rows: ScaledRows, group: int | None) -> torch.Tensor:
    """float32 [T, I]."""
    return dequantize(Fp8Weight(rows.values_TI, rows.scales_TG, group))
