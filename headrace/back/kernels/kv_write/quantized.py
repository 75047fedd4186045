"""A quantized KV cache: one-byte values with a float32 scale per token and head: its layout, and
what it means.

Such a cache is int8 [num_blocks, 2, K, block_tokens, D + 4]: the shape counts the bytes of a token,
but the bytes of a block's head lie as [block_tokens][D] quantized values, then [block_tokens]
scales, so that vectors of quantized values stay aligned. A value is quantized * scale; quantized =
round(x * LARGEST / m), ties to even, with m the largest magnitude of the token's head. Quantized
values are integers up to 127 ("int8"), or e4m3 numbers up to 448 ("fp8": Micikevicius et al. 2022,
section 3) in the same bytes: three bits of mantissa for every size, where int8's steps are equal.
The scale lets both use their whole range. A NaN or Inf makes the scale NaN, so that what is lost
cannot go unseen; no quantized value is e4m3's NaN.
"""

from __future__ import annotations

from typing import Any

import torch

SCALE_BYTES = 4
LARGEST = {"int8": 127.0, "fp8": 448.0}


def values_and_scales(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the cache: values int8 [N, 2, K, B, D] and scales float32 [N, 2, K, B]."""
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
    return kv.view(torch.float8_e4m3fn) if form == "fp8" else kv, kv.view(torch.float32)


def dequantize(kv: torch.Tensor, dtype: torch.dtype, form: str) -> torch.Tensor:
    """What the cache means, [N, 2, K, B, D]."""
    quantized, scales = values_and_scales(kv)
    values = quantized.view(torch.float8_e4m3fn) if form == "fp8" else quantized
    return (values.float() * scales[..., None]).to(dtype)


def quantize(x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values int8 of x [..., D] and scales float32 [...]."""
    x = x.float()
    lost = ~x.isfinite().all(-1)
    x = x.masked_fill(lost[..., None], 0)
    top = x.abs().amax(-1)
    # A number divided by a tensor is its reciprocal's product to torch: rounded twice.
    inverse = torch.where(top > 1e-30, top.new_tensor(LARGEST[form]) / top, 0)
    scaled = (x * inverse[..., None]).clamp_(-LARGEST[form], LARGEST[form])
    quantized = (
        scaled.to(torch.float8_e4m3fn).view(torch.int8)
        if form == "fp8"
        else scaled.round().to(torch.int8)
    )
    return quantized, (top / LARGEST[form]).masked_fill(lost, torch.nan)


def random_quantized_cache(
    shape: tuple[int, int, int, int], *, generator: torch.Generator, device: str
) -> torch.Tensor:
    """A cache of blocks, KV heads, block tokens and head_dim `shape`, with values of about one
    (int8) or less, generated on the generator's device."""
    blocks, heads, block_tokens, head_dim = shape
    kv = torch.zeros(
        blocks, 2, heads, block_tokens, head_dim + SCALE_BYTES, dtype=torch.int8, device=device
    )
    quantized, scales = values_and_scales(kv)
    options: Any = {"generator": generator, "device": generator.device}
    values = torch.randint(-126, 127, quantized.shape, dtype=torch.int8, **options)
    quantized.copy_(values.masked_fill_(values == -1, 0))  # -1 and 127 are e4m3's NaN
    scales.copy_((torch.rand(scales.shape, **options) + 0.5) / 64)
    return kv
