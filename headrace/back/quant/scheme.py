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
    None: all of them, with a float32 scale. `outputs` have one scale in common, 0: all of them.
    `outer`: scales are e4m3 numbers times one float32 for all (NVFP4)."""

    name: str
    bits: int
    group: int | None
    asymmetric: bool = False
    floating: bool = False
    outputs: int = 1
    outer: bool = False

    def quantize(self, weight_OI: torch.Tensor, largest: torch.Tensor | None = None) -> Quantized:
        """Quantized values (int8 [O, I]; of e4m3 its bits), scales and minima (float32 [O, G];
        minima None where they are 0). Of some rows of a weight (whole ones of `outputs`), `largest`
        is the largest magnitude of all; see `common`."""
        weight_OI = weight_OI.float()
        if self.floating:
            largest = self.common(weight_OI) if largest is None else largest
            return _floating(weight_OI, self, largest)
        if self.group is None:
            scales = _divided(weight_OI.abs().amax(1, keepdim=True), 127)
            return _round(weight_OI, scales, -127, 127), scales, None
        outputs, inputs = weight_OI.shape
        groups = F.pad(weight_OI, (0, -inputs % self.group)).view(outputs, -1, self.group)
        quantized, scales, minima = _grouped(groups, self)
        quantized = quantized.view(outputs, -1)[:, :inputs]
        return quantized, scales[..., 0], None if minima is None else minima[..., 0]

    def common(self, weight_OI: torch.Tensor) -> torch.Tensor | None:
        """What scales of the whole weight have in common: its largest magnitude; None: nothing."""
        if self.outputs != 0 and not self.outer:
            return None
        return torch.maximum(weight_OI.amax(), -weight_OI.amin()).float()

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """float32 [O, I]."""
        values, scales, minima = quantized
        if self.floating and self.bits == 8:
            values = values.view(torch.float8_e4m3fn)
        inputs = values.shape[1]
        weight = values.float() * _spread(scales, self.group, inputs)
        return weight if minima is None else weight - _spread(minima, self.group, inputs)


def row_slices(outputs: int, inputs: int, scheme: Scheme, elements: int) -> list[slice]:
    """About so many values at a time, whole blocks of outputs."""
    unit = max(1, scheme.outputs)
    step = unit * max(1, elements // (unit * max(1, inputs)))
    return [slice(first, first + step) for first in range(0, outputs, step)]


def _spread(numbers_OG: torch.Tensor, group: int | None, inputs: int) -> torch.Tensor:
    """One for each input, or for all."""
    if group is None:
        return numbers_OG
    return numbers_OG.repeat_interleave(group, 1)[:, :inputs]


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
"""Ways in which kernels of all devices read weights."""
ONLINE_SCHEMES = {
    **SCHEMES,
    "fp8-tensor": Scheme("fp8-tensor", 8, None, floating=True, outputs=0),
    "fp8-block": Scheme("fp8-block", 8, 128, floating=True, outputs=128),
    "mxfp8": Scheme("mxfp8", 8, 32, floating=True),
    "nvfp4": Scheme("nvfp4", 4, 16, floating=True, outer=True),
}
"""The values of `--quantization`."""


_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _floating(weight_OI: torch.Tensor, scheme: Scheme, common: torch.Tensor | None) -> Quantized:
    if scheme.outer:
        assert common is not None, scheme
        return _two_levels(weight_OI, common)
    if scheme.bits == 4:
        return _microscaled(weight_OI)
    if scheme.group is None:
        largest = _largest(weight_OI[:, None], scheme, common)
        return _e4m3(weight_OI, _divided(largest, LARGEST))
    groups_OGI = _groups(weight_OI, scheme.group)
    scales = _divided(_largest(groups_OGI, scheme, common), LARGEST)
    if scheme.outputs == 1:
        scales = _next_powers(scales)
    values = _e4m3(groups_OGI.flatten(0, 1), scales.reshape(-1, 1))[0].view(len(weight_OI), -1)
    scales = scales.masked_fill(~scales.isfinite(), torch.nan)
    return values[:, : weight_OI.shape[1]], scales, None


LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _groups(weight_OI: torch.Tensor, group: int) -> torch.Tensor:
    return F.pad(weight_OI, (0, -weight_OI.shape[1] % group)).unflatten(1, (-1, group))


def _largest(groups_OGI: torch.Tensor, scheme: Scheme, common: torch.Tensor | None) -> torch.Tensor:
    """The largest magnitudes [O, G] of what shares a scale."""
    largest = groups_OGI.abs().amax(2)
    if common is not None:
        return common.to(largest).expand_as(largest)
    if scheme.outputs == 1:
        return largest
    rows = F.pad(largest, (0, 0, 0, -len(largest) % scheme.outputs)).unflatten(
        0, (-1, scheme.outputs)
    )
    return rows.amax(1).repeat_interleave(scheme.outputs, 0)[: len(largest)]


def _next_powers(scales: torch.Tensor) -> torch.Tensor:
    """The least powers of two that are not smaller, as e8m0 holds them, so that nothing saturates;
    1 for 0. Of what is not finite NaN."""
    size, exponent = torch.frexp(scales)
    exponent = torch.where(size == 0.5, exponent - 1, exponent).clamp(-126, 127)
    powers = torch.ldexp(torch.ones_like(scales), exponent).masked_fill(scales == 0, 1.0)
    return powers.masked_fill(~scales.isfinite(), torch.nan)


def _e4m3(weight_OI: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """The nearest e4m3 numbers, ties to even, of rows whose largest magnitudes become at most 448,
    the largest there is. A row that is not finite has scale NaN; one whose scale has no reciprocal
    counts as zeros."""
    good = scales.isfinite()
    inverse = torch.where(scales < torch.finfo(torch.float32).tiny, 0, 1 / scales)
    values = torch.where(good, (weight_OI * inverse).clamp_(-LARGEST, LARGEST), 0)
    return (
        values.to(torch.float8_e4m3fn).view(torch.int8),
        scales.masked_fill(~good, torch.nan),
        None,
    )


def halved(codes_OI: torch.Tensor, scales_OG: torch.Tensor, group: int = 32) -> Quantized:
    """Twice the numbers of e2m1 bits, and half their scales, so that all are whole: where a scale
    has no half the numbers are 0."""
    small = scales_OG < 2.0**-126
    doubled = torch.tensor(_DOUBLED, dtype=torch.int8, device=codes_OI.device)[codes_OI.int()]
    padded = _groups(doubled, group)
    values = padded.masked_fill(small[..., None], 0).flatten(1)[:, : doubled.shape[1]]
    return values, (scales_OG / 2).masked_fill(small, 2.0**-127), None


def _microscaled(weight_OI: torch.Tensor) -> Quantized:
    """Powers of two as Open Compute's Microscaling Formats 1.0, 6.3, has them: 2 to the exponent of
    a group's largest magnitude less 2, that of 4; then the nearest e2m1 number, ties to even. A
    group that is not finite has scale NaN."""
    groups = _groups(weight_OI, 32)
    largest = groups.abs().amax(2)
    _, exponent = torch.frexp(largest)
    powers = torch.ldexp(torch.ones_like(largest), (exponent - 3).clamp(-127, 127))
    scales = powers.masked_fill(largest == 0, 1.0)
    return _e2m1(groups, scales, weight_OI.shape[1])


def _two_levels(weight_OI: torch.Tensor, common: torch.Tensor) -> Quantized:
    """NVFP4: the largest magnitude of 16 inputs becomes 6, the largest e2m1 number; the largest
    scale 448 times what all have in common."""
    groups = _groups(weight_OI, 16)
    outer = _divided(common, 6 * LARGEST)
    inverse = torch.where(outer < torch.finfo(torch.float32).tiny, 0, 1 / (6 * outer))
    inner = (groups.abs().amax(2) * inverse).clamp(max=LARGEST).to(torch.float8_e4m3fn)
    return _e2m1(groups, inner.float() * outer, weight_OI.shape[1])


def _e2m1(groups_OGI: torch.Tensor, scales_OG: torch.Tensor, inputs: int) -> Quantized:
    """The nearest e2m1 numbers, ties to even, as `halved` gives them; of a scale of 0 zeros."""
    inverse = torch.where(scales_OG == 0, 0, 1 / scales_OG)
    sizes = (groups_OGI * inverse[..., None]).abs()
    steps = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=sizes.device)
    numbers = torch.bucketize(sizes, steps, out_int32=True)  # a tie goes down
    numbers += torch.isin(sizes, steps[1::2])  # to an odd number: up instead
    numbers |= (groups_OGI < 0).to(torch.int32) << 3
    values, halves, _ = halved(numbers.flatten(1), scales_OG, groups_OGI.shape[2])
    bad = ~groups_OGI.isfinite().all(2)
    return values[:, :inputs], halves.masked_fill(bad, torch.nan), None


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
