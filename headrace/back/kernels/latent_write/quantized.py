"""A quantized cache of latents: a byte for each element or less, and two scales for a token.

Such a cache is int8 [num_blocks, block_tokens, V + 8]: the shape counts the bytes of a token, but
the bytes of a block lie as [block_tokens][V] values, then [block_tokens][2] float32 scales: of the
latent's `rank` elements C, and of its rotated ones R. V is C + R, but C / 2 + C / 16 + R of forms
of e2m1 numbers, whose rotated elements are e4m3: positions would suffer most. What values and
scales are, and what becomes of a NaN, says kernels/kv_write/quantized.py.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.kv_write import quantized as heads
from headrace.back.kernels.kv_write.quantized import E2M1, FLOATS
from headrace.back.kernels.kv_write.quantized import quantize as quantize_heads

FORMS = ("fp8", "int8", *E2M1)
SCALE_BYTES = 8


def value_bytes(width: int, rank: int, form: str) -> int:
    """V: bytes of a token's values, of `width` elements."""
    return heads.value_bytes(rank, form) + width - rank if form in E2M1 else width


def unfit(form: str | None, width: int, rank: int, block_tokens: int) -> str | None:
    """Why latents of this width cannot be kept in a form."""
    if form is None:
        return None
    if form not in FORMS:
        return f"latents are kept in the model's dtype (auto), or as {' or '.join(FORMS)}"
    if form in E2M1 and rank % 32:
        return f"{form} keeps latents of a multiple of 32 elements, not {rank}"
    if value_bytes(width, rank, form) * block_tokens % 4:
        return f"{block_tokens} latents of {width} elements leave their scales at no multiple of 4"
    return None


def values_and_scales(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the cache: values int8 [N, B, V] and scales float32 [N, B, 2]."""
    block_tokens, width = kv.shape[1], kv.shape[2] - SCALE_BYTES
    flat = kv.flatten(1)
    cut = block_tokens * width
    scales = flat[:, cut:].view(torch.float32).unflatten(1, (block_tokens, 2))
    return flat[:, :cut].unflatten(1, (block_tokens, width)), scales


def typed(kv: torch.Tensor, form: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cache in the element type it stores (of e2m1 numbers: that of the rotated part), and the
    same memory as float32, where the scales are (None if the cache is not quantized)."""
    if form is None:
        return kv, None
    kind = FLOATS.get("fp8" if form in E2M1 else form, torch.int8)
    return kv.view(kind), kv.flatten(1).view(torch.float32)


def quantize(latent_TW: torch.Tensor, rank: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values int8 [T, V] and scales float32 [T, 2]."""
    own, rotated = latent_TW.tensor_split((rank,), dim=1)
    parts = [quantize_heads(own, form)]
    if rotated.shape[1]:
        parts.append(quantize_heads(rotated, _of_rotated(form)))
    else:
        parts.append((parts[0][0][:, :0], parts[0][1]))
    return torch.cat([values for values, _ in parts], 1), torch.stack([s for _, s in parts], 1)


def _of_rotated(form: str) -> str:
    return "fp8" if form in E2M1 else form


def dequantized(
    values: torch.Tensor, scales: torch.Tensor, rank: int, form: str, dtype: torch.dtype
) -> torch.Tensor:
    """What values [..., V] and scales [..., 2] mean: [..., W]."""
    cut = heads.value_bytes(rank, form)
    own = heads.numbers(values[..., :cut], form) * scales[..., :1]
    rotated = heads.numbers(values[..., cut:], _of_rotated(form)) * scales[..., 1:]
    return torch.cat((own, rotated), dim=-1).to(dtype)


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
    width = value_bytes(shape[2], rank, form) + SCALE_BYTES
    kv = torch.zeros((*shape[:2], width), dtype=torch.int8)
    parts = quantize(latent.flatten(0, 1), rank, form)
    for place, part in zip(values_and_scales(kv), parts, strict=True):
        place.copy_(part.unflatten(0, shape[:2]))
    return kv.to(device)
