"""What quantized numbers mean: how a weight becomes codes and scales. No memory layout, no kernels.

O outputs, I inputs, G groups of a row. A weight is code * scale; both schemes are symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32


@dataclass(frozen=True)
class Scheme:
    """A way to store weights. `bits` 8: codes -127 .. 127 with one float32 scale per output.
    `bits` 4: codes -8 .. 7 with one bfloat16 scale per output and 32 inputs."""

    name: str
    bits: int

    def quantize(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (int8 [O, I]) and scales (float32 [O, G])."""
        return _int8(weight_OI.float()) if self.bits == 8 else _int4(weight_OI.float())


SCHEMES = {"int8": Scheme("int8", 8), "int4": Scheme("int4", 4)}


def _int8(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight_OI.abs().amax(1, keepdim=True) / 127
    return _codes(weight_OI, scales, -127, 127), scales


def _int4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of the largest magnitude becomes code -8, whatever its sign: all 16 codes are used,
    where a scale of max / 7 would leave one idle."""
    outputs, inputs = weight_OI.shape
    groups = F.pad(weight_OI, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    at = groups.abs().argmax(2, keepdim=True)
    scales = (groups.gather(2, at) / -8).bfloat16().float()
    codes = _codes(groups, scales, -8, 7).view(outputs, -1)[:, :inputs]
    return codes, scales[..., 0]


def _codes(weight: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The nearest codes; a scale of 0 (a row of zeros) gives code 0."""
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (weight * inverse).round_().clamp_(low, high).to(torch.int8)
