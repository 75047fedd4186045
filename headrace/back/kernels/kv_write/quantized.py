"""A quantized KV cache: values of a byte or less with a scale per token and head: its layout, and
what it means.

Such a cache is int8 [num_blocks, 2, K, block_tokens, V + 4]: the shape counts the bytes of a token,
but the bytes of a block's head lie as [block_tokens][V] quantized values, then [block_tokens]
scales, so that vectors of quantized values stay aligned. V is D, but D / 2 of forms
of 4 bits, 3 D / 8 of those of 3 bits and D / 2 + D / 16 of "nvfp4".

A value is quantized * scale; quantized = round(x * LARGEST / m), ties to even, with m the largest
magnitude of the token's head and a float32 scale. Quantized values are integers up to 127 ("int8"),
e4m3 numbers up to 448 ("fp8": Micikevicius et al. 2022, section 3) or e5m2 numbers up to 57344
("fp8_e5m2") in the same bytes: three or two bits of mantissa for every size, where int8's steps are
equal. The scale lets all use their whole range.

With fixed scales (of "fp8"), which belong to keys and values of a head or of all, m is none of the
token's: values beyond the scale's range become the largest number. They are stored beside each
token all the same.

"int4" holds numbers 0 .. 15, of dimension i in the lower half of byte i and of D / 2 + i in its
upper half; a value is number * scale + low, from a token's smallest value to its largest in 15
steps. Scale and low are float16 numbers, in the four bytes of a scale.

The rotated forms ("...-rotated") hold such numbers, of 3 bits 0 .. 7, of a head that was multiplied
by fixed signs and the Hadamard matrix over the root of D: what stands out is spread over all
dimensions (Zandieh et al. 2025, TurboQuant). Of 3 bits, byte i has the lower two of dimensions i, D
/ 4 + i, ... from its lowest bits on, and byte D / 4 + i the third of dimensions i, D / 8 + i, ...

The TurboQuant forms have indices of the levels that lose least of normal values (Max 1960), which
the elements of a rotated head nearly are, in units of its root mean square rounded to float16; the
scale, a float16 number beside a smallest value of 0, gives the head its own norm back. Numbers
from the lowest level on, placed as those of as many bits are.

"nvfp4" holds e2m1 numbers (Open Compute, Microscaling Formats 1.0, 5.3.3), placed likewise, then an
e4m3 scale for each 16 dimensions: that of the largest magnitude, which becomes 6, in units of the
token's float32 scale, by which the largest of all is 448. Nearest numbers, ties to even.
"nvfp4-4over6" is read as "nvfp4" is; when it is written, the largest of 16 becomes 6 or 4,
whichever loses less in the sum of squares, and the token's scale makes the largest of all 256, so
that the scales of fours have room (Cook et al. 2025, Four Over Six).

A NaN or Inf (or what float16 does not hold) makes the scale, read as float32, NaN, so that what is
lost cannot go unseen; no quantized value is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

SCALE_BYTES = 4
LARGEST = {"int8": 127.0, "fp8": 448.0, "fp8_e5m2": 57344.0}
FLOATS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The type of the values of forms that hold floats."""
E2M1 = {"nvfp4": 448.0, "nvfp4-4over6": 256.0}
"""Forms of e2m1 numbers, and the e4m3 scale of a token's largest magnitude."""
HALVES = ("int4", *E2M1, "int4-rotated", "turboquant-4bit")
"""Forms with two dimensions in a byte."""
THREE_BITS = ("int3-rotated", "turboquant-3bit")
ROTATED = {"int4-rotated": 15, "int3-rotated": 7, "turboquant-4bit": 15, "turboquant-3bit": 7}
"""Forms of a rotated head, and their largest numbers."""
LEVELS = {
    "turboquant-4bit": (0.1284, 0.38807, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
    "turboquant-3bit": (0.24509, 0.75601, 1.34391, 2.15195),
}
"""Magnitudes of levels for normal values."""
STEPS = {
    "turboquant-4bit": (0.258235, 0.522415, 0.79955, 1.099285, 1.43714, 1.843535, 2.400805),
    "turboquant-3bit": (0.50055, 1.04996, 1.74793),
}
"""Midpoints of neighbours: from there on the next one is taken."""
_SHARED = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def value_bytes(head_dim: int, form: str) -> int:
    """Bytes of a token's values of one head."""
    if form in THREE_BITS:
        return head_dim // 8 * 3
    if form not in HALVES:
        return head_dim
    return head_dim // 2 + (-(-head_dim // _SHARED) if form in E2M1 else 0)


def unfit(form: str | None, head_dim: int) -> str | None:
    """Why heads of a size cannot be kept in a form."""
    if form in ROTATED and (head_dim < 16 or head_dim & (head_dim - 1)):
        return f"{form} rotates heads whose size is a power of two from 16 on, not {head_dim}"
    if form in HALVES and head_dim % 2:
        return f"{form} puts two dimensions into a byte, {head_dim} are odd"
    return None


def values_and_scales(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the cache: values int8 [N, 2, K, B, V] and scales float32 [N, 2, K, B]."""
    block_tokens, width = kv.shape[3:]
    flat = kv.flatten(3)
    cut = block_tokens * (width - SCALE_BYTES)
    quantized = flat[..., :cut].unflatten(3, (block_tokens, width - SCALE_BYTES))
    return quantized, flat[..., cut:].view(torch.float32)


def typed(kv: torch.Tensor, form: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cache in the element type it stores, and the same memory as float32, where the scales are
    (None if the cache is not quantized)."""
    if form is None:
        return kv, None
    return kv.view(FLOATS.get(form, torch.int8)), kv.flatten(3).view(torch.float32)


def dequantize(kv: torch.Tensor, dtype: torch.dtype, form: str) -> torch.Tensor:
    """What the cache means, [N, 2, K, B, D]."""
    quantized, scales = values_and_scales(kv)
    if form == "int4" or form in ROTATED:
        scale, low = scales.contiguous()[..., None].view(torch.float16).float().chunk(2, -1)
        values = _meant(_numbers(quantized, form), form) * scale + low
        return (_restored(values) if form in ROTATED else values).to(dtype)
    return (numbers(quantized, form) * scales[..., None]).to(dtype)


def numbers(quantized: torch.Tensor, form: str) -> torch.Tensor:
    """float32 [..., D] in units of the token's scale, of values int8 [..., V] of forms without a
    smallest value."""
    if form in E2M1:
        return _e2m1_values(quantized)
    return quantized.contiguous().view(FLOATS.get(form, torch.int8)).float()


def quantize(
    x: torch.Tensor, form: str, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values int8 [..., V] of x [..., D] and scales float32 [...]; `fixed`: those,
    whatever x holds."""
    x = x.float()
    lost = ~x.isfinite().all(-1)
    x = x.masked_fill(lost[..., None], 0)
    if form in LEVELS:
        numbers, slots = _nearest_levels(_rotated(x), lost, form)
        return _packed(numbers, form), slots
    if form == "int4" or form in ROTATED:
        numbers, slots = (
            _whole_numbers(_rotated(x), lost, ROTATED[form])
            if form in ROTATED
            else _whole_numbers(x, lost, 15)
        )
        return _packed(numbers, form), slots
    if form in E2M1:
        return _e2m1(x, lost, form)
    assert fixed is None or form == "fp8", form
    top = x.abs().amax(-1)
    # A number divided by a tensor is its reciprocal's product to torch: rounded twice.
    inverse = torch.where(top > 1e-30, top.new_full((), LARGEST[form]) / top, 0)
    scales = top / LARGEST[form]
    if fixed is not None:
        inverse, scales = x.new_full((), 1.0) / fixed.expand(top.shape), fixed.expand(top.shape)
    scaled = (x * inverse[..., None]).clamp_(-LARGEST[form], LARGEST[form])
    quantized = (
        scaled.to(FLOATS[form]).view(torch.int8)
        if form in FLOATS
        else scaled.round().to(torch.int8)
    )
    return quantized, scales.masked_fill(lost, torch.nan)


def _whole_numbers(
    x: torch.Tensor, lost: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = x.amin(-1), x.amax(-1)
    pair = torch.stack(((high - low) / x.new_full((), float(most)), low), -1).to(torch.float16)
    lost = lost | ~pair.isfinite().all(-1)
    scale, base = pair.float().masked_fill(lost[..., None], 0).unbind(-1)
    inverse = torch.where(scale > 0, x.new_full((), 1.0) / scale, 0)
    numbers = ((x - base[..., None]) * inverse[..., None]).clamp_(0, most).round().to(torch.int8)
    slots = pair.contiguous().view(torch.float32)[..., 0]
    return numbers.masked_fill(lost[..., None], 0), slots.masked_fill(lost, torch.nan)


def _nearest_levels(
    x: torch.Tensor, lost: torch.Tensor, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    squares = x.square().sum(-1)
    root = (squares / x.shape[-1]).sqrt().to(torch.float16).float()
    lost = lost | ~root.isfinite()
    inverse = torch.where((root > 0) & ~lost, x.new_full((), 1.0) / root, 0)
    sizes = (x * inverse[..., None]).abs()
    steps = torch.tensor(STEPS[form], device=x.device)
    places = (sizes[..., None] > steps).sum(-1)
    top = len(LEVELS[form])
    numbers = torch.where(x < 0, top - 1 - places, top + places).to(torch.int8)
    meaning = _meant(numbers, form).square().sum(-1)
    scale = (squares / meaning).sqrt().to(torch.float16)
    pair = torch.stack((scale, torch.zeros_like(scale)), -1)
    slots = pair.contiguous().view(torch.float32)[..., 0]
    return numbers.masked_fill(lost[..., None], 0), slots.masked_fill(lost, torch.nan)


def _meant(numbers: torch.Tensor, form: str) -> torch.Tensor:
    """What numbers stand for, float32, in units of the scale."""
    if form not in LEVELS:
        return numbers.float()
    sizes = LEVELS[form]
    both = (*(-size for size in reversed(sizes)), *sizes)
    return torch.tensor(both, device=numbers.device)[numbers.long()]


def _packed(numbers: torch.Tensor, form: str) -> torch.Tensor:
    if form not in THREE_BITS:
        lower, upper = numbers.chunk(2, -1)
        return lower | upper << 4
    low = sum(part << 2 * q for q, part in enumerate((numbers & 3).chunk(4, -1)))
    high = sum(part << j for j, part in enumerate((numbers >> 2).chunk(8, -1)))
    return torch.cat((low, high), -1)


def _numbers(quantized: torch.Tensor, form: str) -> torch.Tensor:
    if form not in THREE_BITS:
        return torch.cat((quantized & 15, (quantized >> 4) & 15), -1)
    low, high = quantized.split([quantized.shape[-1] // 3 * 2, quantized.shape[-1] // 3], -1)
    lower = torch.cat([low >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    return lower | torch.cat([high >> bit & 1 for bit in range(8)], -1) << 2


def _rotated(x: torch.Tensor) -> torch.Tensor:
    return _hadamard(x * _signs(x))


def _restored(x: torch.Tensor) -> torch.Tensor:
    return _hadamard(x) * _signs(x)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    size, apart = x.shape[-1], 1
    while apart < size:
        first, second = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        apart *= 2
    return x * x.new_full((), size**-0.5)


def rotation(head_dim: int) -> torch.Tensor:
    """What heads of rotated forms are multiplied with from the right, float32 [D, D]; its transpose
    turns them back."""
    return _rotated(torch.eye(head_dim))


def _signs(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-1], device=x.device)
    return 1.0 - 2.0 * ((places * 0x9E3779B1 & 0xFFFFFFFF) >> 31).to(x.dtype)


def _e2m1(x: torch.Tensor, lost: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim, most = x.shape[-1], E2M1[form]
    groups = F.pad(x, (0, -head_dim % _SHARED)).unflatten(-1, (-1, _SHARED))
    largest = groups.abs().amax(-1)
    top = largest.amax(-1, keepdim=True)
    outer = top / top.new_full((), 6 * most)
    inverse = torch.where(top > 1e-30, top.new_full((), most) / top, 0)
    numbers, group_scales = _e2m1_groups(groups, largest * inverse, outer)
    if form == "nvfp4-4over6":
        fours, scales_of_fours = _e2m1_groups(groups, largest * inverse * 1.5, outer)
        lost_by = [
            _off(groups, *parts, outer)
            for parts in ((numbers, group_scales), (fours, scales_of_fours))
        ]
        fewer = lost_by[1] < lost_by[0]
        numbers = torch.where(fewer[..., None], fours, numbers)
        group_scales = torch.where(fewer, scales_of_fours.float(), group_scales.float())
        group_scales = group_scales.to(torch.float8_e4m3fn)
    lower, upper = numbers.to(torch.int8).flatten(-2)[..., :head_dim].chunk(2, -1)
    quantized = torch.cat((lower | upper << 4, group_scales.view(torch.int8)), -1)
    return quantized, outer[..., 0].masked_fill(lost, torch.nan)


def _e2m1_groups(
    groups: torch.Tensor, wanted: torch.Tensor, outer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of e2m1 [..., G, 16] and e4m3 scales [..., G], the nearest to those that are wanted in
    units of the token's."""
    group_scales = wanted.clamp(max=LARGEST["fp8"]).to(torch.float8_e4m3fn)
    scales = group_scales.float() * outer
    unit = torch.where(scales > 0, scales.new_full((), 1.0) / scales, 0)
    sizes = groups.abs() * unit[..., None]
    steps = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=groups.device)
    numbers = torch.bucketize(sizes, steps)  # a tie goes down
    numbers += torch.isin(sizes, steps[1::2])  # to an odd number: up instead
    return numbers | (groups < 0).to(torch.int64) << 3, group_scales


def _off(
    groups: torch.Tensor, numbers: torch.Tensor, group_scales: torch.Tensor, outer: torch.Tensor
) -> torch.Tensor:
    """What numbers lose of each group [..., G]: the sum of squares."""
    levels = torch.tensor((*_E2M1, *(-level for level in _E2M1)), device=groups.device)
    values = levels[numbers] * (group_scales.float() * outer)[..., None]
    return (values - groups).square().sum(-1)


def _e2m1_values(quantized: torch.Tensor) -> torch.Tensor:
    """In units of the token's scale."""
    half = quantized.shape[-1] * 8 // 9  # of head_dim / 2 + head_dim / 16 bytes, rounded up
    half = next(n for n in range(half, 0, -1) if n + -(-2 * n // _SHARED) == quantized.shape[-1])
    numbers = torch.cat((quantized[..., :half] & 15, (quantized[..., :half] >> 4) & 15), -1).long()
    levels = torch.tensor((*_E2M1, *(-level for level in _E2M1)), device=quantized.device)
    scales = quantized[..., half:].contiguous().view(torch.float8_e4m3fn).float()
    return levels[numbers] * scales.repeat_interleave(_SHARED, -1)[..., : 2 * half]


def random_quantized_cache(
    shape: tuple[int, int, int, int],
    *,
    generator: torch.Generator,
    device: str,
    form: str = "int8",
) -> torch.Tensor:
    """A cache of blocks, KV heads, block tokens and head_dim `shape`, with values of about one
    (int8) or less, generated on the generator's device."""
    blocks, heads, block_tokens, head_dim = shape
    width = value_bytes(head_dim, form) + SCALE_BYTES
    kv = torch.zeros(blocks, 2, heads, block_tokens, width, dtype=torch.int8, device=device)
    quantized, scales = values_and_scales(kv)
    options: Any = {"generator": generator, "device": generator.device}
    if form not in ("int8", "fp8"):
        values = torch.randn(*kv.shape[:4], head_dim, **options)
        for place, part in zip((quantized, scales), quantize(values, form), strict=True):
            place.copy_(part)
        return kv
    values = torch.randint(-126, 127, quantized.shape, dtype=torch.int8, **options)
    quantized.copy_(values.masked_fill_(values == -1, 0))  # -1 and 127 are e4m3's NaN
    scales.copy_((torch.rand(scales.shape, **options) + 0.5) / 64)
    return kv
