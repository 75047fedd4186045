"""A KV cache of int8 codes with a float32 scale per token and head (QNT-18): its layout, and what it means.

Such a cache is int8 [num_blocks, 2, K, block_tokens, D + 4]: the shape counts the bytes of a token, but the bytes of a
block's head lie as [block_tokens][D] codes, then [block_tokens] scales, so that vectors of codes stay aligned.
A value is code * scale; code = round(x * 127 / m), ties to even, with m the largest magnitude of the token's head.
A NaN or Inf makes the scale NaN, so that what is lost cannot go unseen.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4


def codes_and_scales(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the cache: codes int8 [N, 2, K, B, D] and scales float32 [N, 2, K, B]."""
    block_tokens, width = kv.shape[3:]
    flat = kv.flatten(3)
    cut = block_tokens * (width - SCALE_BYTES)
    codes = flat[..., :cut].unflatten(3, (block_tokens, width - SCALE_BYTES))
    return codes, flat[..., cut:].view(torch.float32)


def widen(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the cache means, [N, 2, K, B, D]."""
    codes, scales = codes_and_scales(kv)
    return (codes.float() * scales[..., None]).to(dtype)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 of x [..., D] and scales float32 [...]."""
    x = x.float()
    lost = ~x.isfinite().all(-1)
    x = x.masked_fill(lost[..., None], 0)
    top = x.abs().amax(-1)
    # A number divided by a tensor is its reciprocal's product to torch: rounded twice.
    inverse = torch.where(top > 1e-30, top.new_tensor(127.0) / top, 0)
    codes = (x * inverse[..., None]).round().to(torch.int8)
    return codes, (top / 127.0).masked_fill(lost, torch.nan)


def random_cache(
    shape: tuple[int, int, int, int], *, generator: torch.Generator, device: str
) -> torch.Tensor:
    """A cache of blocks, KV heads, block tokens and head_dim `shape`, with values of about one."""
    blocks, heads, block_tokens, head_dim = shape
    kv = torch.zeros(
        blocks, 2, heads, block_tokens, head_dim + SCALE_BYTES, dtype=torch.int8, device=device
    )
    codes, scales = codes_and_scales(kv)
    codes.copy_(torch.randint(-127, 128, codes.shape, generator=generator))
    scales.copy_((torch.rand(scales.shape, generator=generator) + 0.5) / 64)
    return kv
