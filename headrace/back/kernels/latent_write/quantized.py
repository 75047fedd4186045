"""A quantized cache of latents: a byte for each element, and two scales for a token.

Such a cache is int8 [num_blocks, block_tokens, W + 8]: the shape counts the bytes of a token, but
the bytes of a block lie as [block_tokens][W] values, then [block_tokens][2] float32 scales: of the
latent's `rank` elements, and of its rotated ones. What values and scales are, and what becomes of a
NaN, says kernels/kv_write/quantized.py.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.kv_write.quantized import FLOATS
from headrace.back.kernels.kv_write.quantized import quantize as quantize_heads

FORMS = ("fp8", "int8")
SCALE_BYTES = 8


def unfit(form: str | None, width: int, block_tokens: int) -> str | None:
    """Why latents of this width cannot be kept in a form."""
    if form is None:
        return None
    if form not in FORMS:
        return f"latents are kept in the model's dtype (auto), or as {' or '.join(FORMS)}"
    if width * block_tokens % 4:
        return f"{block_tokens} latents of {width} elements leave their scales at no multiple of 4"
    return None


def values_and_scales(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the cache: values int8 [N, B, W] and scales float32 [N, B, 2]."""
    block_tokens, width = kv.shape[1], kv.shape[2] - SCALE_BYTES
    flat = kv.flatten(1)
    cut = block_tokens * width
    scales = flat[:, cut:].view(torch.float32).unflatten(1, (block_tokens, 2))
    return flat[:, :cut].unflatten(1, (block_tokens, width)), scales


def typed(kv: torch.Tensor, form: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cache in the element type it stores, and the same memory as float32, where the scales are
    (None if the cache is not quantized)."""
    if form is None:
        return kv, None
    return kv.view(FLOATS.get(form, torch.int8)), kv.flatten(1).view(torch.float32)


def quantize(latent_TW: torch.Tensor, rank: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values int8 [T, W] and scales float32 [T, 2]."""
    parts = [quantize_heads(part, form) for part in latent_TW.tensor_split((rank,), dim=1)]
    if latent_TW.shape[1] == rank:
        parts[1:] = [(latent_TW.new_zeros((len(latent_TW), 0), dtype=torch.int8), parts[0][1])]
    return torch.cat([values for values, _ in parts], 1), torch.stack([s for _, s in parts], 1)


def dequantized(
    values: torch.Tensor, scales: torch.Tensor, rank: int, form: str, dtype: torch.dtype
) -> torch.Tensor:
    """What values [..., W] and scales [..., 2] mean."""
    numbers = values.view(FLOATS.get(form, torch.int8)).float()
    own = numbers[..., :rank] * scales[..., :1]
    return torch.cat((own, numbers[..., rank:] * scales[..., 1:]), dim=-1).to(dtype)


def latents(kv: torch.Tensor, rank: int, form: str | None, dtype: torch.dtype) -> torch.Tensor:
    """What a cache, quantized or not, means: [N, B, W]."""
    return kv if form is None else dequantized(*values_and_scales(kv), rank, form, dtype)


def random_cache(
    shape: tuple[int, int, int],
    rank: int,
    form: str | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: torch.Generator,
) -> torch.Tensor:
    """A cache of random latents of a shape [N, B, W]."""
    latent = torch.randn(shape, generator=generator)
    if form is None:
        return latent.to(device=device, dtype=dtype)
    kv = torch.zeros((*shape[:2], shape[2] + SCALE_BYTES), dtype=torch.int8)
    parts = quantize(latent.flatten(0, 1), rank, form)
    for place, part in zip(values_and_scales(kv), parts, strict=True):
        place.copy_(part.unflatten(0, shape[:2]))
    return kv.to(device)
