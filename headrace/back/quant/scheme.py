"""What quantized numbers mean: how a weight becomes quantized values, scales and minima. No memory
layout, no kernels.

O outputs, I inputs, G groups of a row. A weight is value * scale - minimum, the minimum 0 but in
asymmetric schemes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Scheme:
    """A way to store weights. `bits` 8: quantized values -127 .. 127, or e4m3 if `floating`; 4:
    quantized values -8 .. 7, or 0 .. 15 if `asymmetric`, or twice e2m1 numbers if `floating`.
    `group` inputs of an output share a bfloat16 scale (and minimum), for e2m1 a power of two;
    None: all of them, with a float32 scale."""

    name: str
    bits: int
    group: int | None
    asymmetric: bool = False
    floating: bool = False

    def quantize(self, weight_OI: torch.Tensor) -> Quantized:
        """Quantized values (int8 [O, I]; of e4m3 its bits), scales and minima (float32 [O, G];
        minima None where they are 0)."""
        weight_OI = weight_OI.float()
        if self.floating:
            return _floating(weight_OI) if self.group is None else _microscaled(weight_OI)
        if self.group is None:
            scales = _divided(weight_OI.abs().amax(1, keepdim=True), 127)
            return _round(weight_OI, scales, -127, 127), scales, None
        outputs, inputs = weight_OI.shape
        groups = F.pad(weight_OI, (0, -inputs % self.group)).view(outputs, -1, self.group)
        quantized, scales, minima = _grouped(groups, self)
        quantized = quantized.view(outputs, -1)[:, :inputs]
        return quantized, scales[..., 0], None if minima is None else minima[..., 0]


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", 8, None),
        *(Scheme(f"int8-g{group}", 8, group) for group in (32, 64, 128)),
        Scheme("fp8", 8, None, floating=True),
        Scheme("int4", 4, 32),
        *(Scheme(f"int4-g{group}", 4, group) for group in (64, 128)),
        Scheme("int4-asym", 4, 32, asymmetric=True),
        *(Scheme(f"int4-asym-g{group}", 4, group, asymmetric=True) for group in (64, 128)),
        Scheme("mxfp4", 4, 32, floating=True),
    )
}
"""The values of `--quantization`."""


_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _floating(weight_OI: torch.Tensor) -> Quantized:
    """The nearest e4m3 numbers, ties to even, of a row whose largest magnitude becomes 448, the
    largest there is. A row that is not finite has scale NaN; one whose scale has no reciprocal
    counts as zeros."""
    scales = _divided(weight_OI.abs().amax(1, keepdim=True), torch.finfo(torch.float8_e4m3fn).max)
    good = scales.isfinite()
    inverse = torch.where(scales < torch.finfo(torch.float32).tiny, 0, 1 / scales)
    values = torch.where(good, (weight_OI * inverse).clamp_(-448, 448), 0)
    return (
        values.to(torch.float8_e4m3fn).view(torch.int8),
        scales.masked_fill(~good, torch.nan),
        None,
    )


def halved(codes_OI: torch.Tensor, scales_OG: torch.Tensor) -> Quantized:
    """Twice the numbers of e2m1 bits, and half their scales, so that all are whole: where a scale
    has no half the numbers are 0."""
    small = scales_OG < 2.0**-126
    doubled = torch.tensor(_DOUBLED, dtype=torch.int8, device=codes_OI.device)[codes_OI.int()]
    padded = F.pad(doubled, (0, -doubled.shape[1] % 32)).unflatten(1, (-1, 32))
    values = padded.masked_fill(small[..., None], 0).flatten(1)[:, : doubled.shape[1]]
    return values, (scales_OG / 2).masked_fill(small, 2.0**-127), None


def _microscaled(weight_OI: torch.Tensor) -> Quantized:
    """Powers of two as Open Compute's Microscaling Formats 1.0, 6.3, has them: 2 to the exponent of
    a group's largest magnitude less 2, that of 4; then the nearest e2m1 number, ties to even. A
    group that is not finite has scale NaN."""
    inputs = weight_OI.shape[1]
    groups = F.pad(weight_OI, (0, -inputs % 32)).unflatten(1, (-1, 32))
    largest = groups.abs().amax(2)
    _, exponent = torch.frexp(largest)
    powers = torch.ldexp(torch.ones_like(largest), (exponent - 3).clamp(-127, 127))
    scales = powers.masked_fill(largest == 0, 1.0)
    sizes = (groups / scales[..., None]).abs()
    steps = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=sizes.device)
    numbers = torch.bucketize(sizes, steps)  # a tie goes down
    odd = torch.isin(sizes, steps[1::2])  # to an odd number: up instead
    numbers = (numbers + odd) | (groups < 0).to(torch.int64) << 3
    values, halves, _ = halved(numbers.flatten(1), scales)
    return values[:, :inputs], halves.masked_fill(~largest.isfinite(), torch.nan), None


def _grouped(groups_OGI: torch.Tensor, scheme: Scheme) -> Quantized:
    if scheme.asymmetric:
        return _asymmetric(groups_OGI)
    if scheme.bits == 8:
        scales = _divided(groups_OGI.abs().amax(2, keepdim=True), 127).bfloat16().float()
        return _round(groups_OGI, scales, -127, 127), scales, None
    # The value of the largest magnitude becomes -8, whatever its sign: all 16 quantized values are
    # used, where a scale of max / 7 would leave one idle.
    at = groups_OGI.abs().argmax(2, keepdim=True)
    scales = (groups_OGI.gather(2, at) / -8).bfloat16().float()
    return _round(groups_OGI, scales, -8, 7), scales, None


def _asymmetric(groups_OGI: torch.Tensor) -> Quantized:
    """The range from the smallest value to the largest, zero included, in 15 steps."""
    low = groups_OGI.amin(2, keepdim=True).clamp(max=0)
    high = groups_OGI.amax(2, keepdim=True).clamp(min=0)
    scales, minima = _divided(high - low, 15).bfloat16().float(), (-low).bfloat16().float()
    return _round(groups_OGI + minima, scales, 0, 15), scales, minima


def _divided(values: torch.Tensor, by: float) -> torch.Tensor:
    """values / by, rounded once on every device: PyTorch multiplies by the reciprocal of a number
    on GPUs, and a model would be quantized to other bits there than on CPUs."""
    return values / values.new_full((), by)


def _round(weight: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The nearest quantized values; a scale of 0 (a row of zeros) gives value 0."""
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (weight * inverse).round_().clamp_(low, high).to(torch.int8)
