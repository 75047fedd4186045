"""Quantized matrices as compressed-tensors lays them out, and the section of config.json that says
so: what a checkpoint of ours gives other engines to read.

Source: the formats as compressed-tensors 0.9 reads them. O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from headrace.back.quant.scheme import Scheme

WRITTEN = ("int4", "int4-g64", "int4-g128", "int4-asym", "int4-asym-g64", "int4-asym-g128",
           "int8", "int8-g32", "int8-g64", "int8-g128", "fp8")  # fmt: skip
"""Schemes that there is a layout for."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a weight [O, I] may become: (number - zero) * scale, with whole numbers from `low` to
    `high`, or e4m3 numbers (`floating`). Scales and zero points (whole; None: 0) [O, G] belong to
    `group` inputs; None: to all of them."""

    scales_OG: torch.Tensor
    zeros_OG: torch.Tensor | None
    group: int | None
    low: int
    high: int
    floating: bool = False

    def nearest(self, values: torch.Tensor, column: int | None = None) -> torch.Tensor:
        """The nearest numbers, float32, of a whole weight or of one of its columns [O, 1]."""
        scales, zeros = self._of(column, values.shape[1])
        inverse = torch.where(scales == 0, 0, 1 / scales)
        if self.floating:
            return (values * inverse).clamp(self.low, self.high).to(torch.float8_e4m3fn).float()
        return ((values * inverse).round() + zeros).clamp(self.low, self.high)

    def meaning(self, numbers: torch.Tensor, column: int | None = None) -> torch.Tensor:
        """The weight that numbers stand for."""
        scales, zeros = self._of(column, numbers.shape[1])
        return (numbers - zeros) * scales

    def shrunk(self, factor: float) -> Grid:
        """With smaller scales, as they are stored."""
        scales = self.scales_OG * factor
        if self.group is not None:
            scales = scales.bfloat16().float()
        return replace(self, scales_OG=scales)

    def where(self, chosen_OG: torch.Tensor, other: Grid) -> Grid:
        """The other's scales in the groups that are chosen."""
        return replace(self, scales_OG=torch.where(chosen_OG, other.scales_OG, self.scales_OG))

    def by_group(self, values_OI: torch.Tensor) -> torch.Tensor:
        """Sums over the inputs of each group [O, G]."""
        if self.group is None:
            return values_OI.sum(1, keepdim=True)
        padded = F.pad(values_OI, (0, -values_OI.shape[1] % self.group))
        return padded.unflatten(1, (-1, self.group)).sum(2)

    def _of(self, column: int | None, width: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        scales, zeros = self.scales_OG, self.zeros_OG
        if self.group is None:
            return scales, 0.0 if zeros is None else zeros
        if column is not None:
            place = slice(column // self.group, column // self.group + 1)
            return scales[:, place], 0.0 if zeros is None else zeros[:, place]
        wide = scales.repeat_interleave(self.group, 1)[:, :width]
        if zeros is None:
            return wide, 0.0
        return wide, zeros.repeat_interleave(self.group, 1)[:, :width]


def grid_of(weight_OI: torch.Tensor, scheme: Scheme) -> Grid:
    """The grid that reaches a weight's smallest and largest values; ValueError if it holds NaN or
    Inf. Scales of groups are bfloat16 numbers."""
    _, scales_OG, minima_OG = scheme.quantize(weight_OI)
    if not bool(scales_OG.isfinite().all()):
        raise ValueError("holds NaN or Inf")
    if scheme.group is None:
        most = 448 if scheme.floating else 127
        return Grid(scales_OG=scales_OG, zeros_OG=None, group=None, low=-most, high=most,
                    floating=scheme.floating)  # fmt: skip
    scales = torch.where(scales_OG == 0, 1.0, scales_OG)
    half = 1 << (scheme.bits - 1)
    if minima_OG is None:
        low = -half if scheme.bits == 4 else 1 - half
        return Grid(scales_OG=scales, zeros_OG=None, group=scheme.group, low=low, high=half - 1)
    # A zero point is a whole number: the minimum moves to the nearest.
    zeros = (minima_OG / scales).round().clamp(0, 2 * half - 1)
    return Grid(scales_OG=scales, zeros_OG=zeros, group=scheme.group, low=0, high=2 * half - 1)


def stored(numbers_OI: torch.Tensor, grid: Grid, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors that stand for numbers of a grid, by what follows the module's name."""
    if scheme.group is None:
        dtype = torch.float8_e4m3fn if scheme.floating else torch.int8
        return {"weight": numbers_OI.to(dtype), "weight_scale": grid.scales_OG}
    fields_OI = numbers_OI.int() + (0 if scheme.asymmetric else 1 << (scheme.bits - 1))
    tensors = {
        "weight_packed": packed(fields_OI, scheme.bits),
        "weight_scale": grid.scales_OG.bfloat16(),
        "weight_shape": torch.tensor(numbers_OI.shape, dtype=torch.int64),
    }
    if grid.zeros_OG is not None:
        zeros_GO = grid.zeros_OG.int().t().contiguous()
        tensors["weight_zero_point"] = packed(zeros_GO, scheme.bits).t().contiguous()
    return tensors


def packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned fields [R, C] in words of 32 bits [R, ceil(C bits / 32)], lowest bits first."""
    per = 32 // bits
    padded = F.pad(fields.long(), (0, -fields.shape[1] % per)).unflatten(1, (-1, per))
    words = (padded << torch.arange(per) * bits).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def takes(shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether a weight of this shape can be written: groups and zero points are whole words."""
    outputs, inputs = shape
    per = 32 // scheme.bits
    whole = scheme.group is None or inputs % scheme.group == 0
    return whole and (not scheme.asymmetric or outputs % per == 0)


def config(scheme: Scheme, ignored: Collection[str]) -> dict[str, Any]:
    """`quantization_config`: all linear modules but the `ignored` ones. With a scale per output
    activations are quantized as they come, in 8 bits a token; else they stay as they are."""
    kind = "float" if scheme.floating else "int"
    strategy = "channel" if scheme.group is None else "group"
    activations = _arguments(8, kind, "token", dynamic=True) if scheme.group is None else None
    weights = _arguments(scheme.bits, kind, strategy, symmetric=not scheme.asymmetric)
    form = {None: "float-quantized" if scheme.floating else "int-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": form.get(scheme.group, "pack-quantized"),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | {"group_size": scheme.group},
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": sorted(ignored),
    }


def _arguments(
    bits: int, kind: str, strategy: str, *, symmetric: bool = True, dynamic: bool = False
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": dynamic,
        "actorder": None,
        "group_size": None,
    }
