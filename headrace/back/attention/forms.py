"""What each cache of a model looks like; grouping, pool sizes and tensors follow from it alone.

A cache has an id of its own. A layer may have several (an indexer's keys beside latents), and
several layers may read one. `Batch.kv[cache]` is its tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.back.kernels.kv_write.quantized import (
    SCALE_BYTES,
    value_bytes,
    values_and_scales,
)
from headrace.back.kernels.latent_write.quantized import SCALE_BYTES as LATENT_SCALE_BYTES
from headrace.back.kernels.latent_write.quantized import value_bytes as latent_value_bytes
from headrace.back.kernels.latent_write.quantized import (
    values_and_scales as latent_values_and_scales,
)


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """One cache on this rank.

    cache   its id; those of a model are 0, 1, 2, ...
    kind    which tokens a query reads and how long they are kept (core/kv/kinds)
    span    tokens of a window, a chunk or an encoder's output, else None. A window of W means that
            a query at position p attends to positions p-W+1 .. p
    ranks   that share out its sequences, token by token: a block here has a part of its tokens
    """

    cache: int
    kind: str = "full"
    span: int | None = None
    ranks: int = 1

    def block_ratio(self, block_tokens: int) -> int:
        """Its blocks hold this many times the tokens of a plain block, those on other ranks
        included."""
        return self.ranks

    def shape_beside(self, block_tokens: int) -> tuple[int, ...]:
        """The shape of its blocks where plain ones hold so many tokens."""
        return self.block_shape(block_tokens * self.block_ratio(block_tokens) // self.ranks)

    def block_shape(self, block_tokens: int) -> tuple[int, ...]:
        """The shape of one block of so many tokens (of a row, for recurrent state)."""
        raise NotImplementedError

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in memory in a model that computes in `dtype`."""
        return dtype

    def floats(self, cache: torch.Tensor) -> torch.Tensor:
        """The part of the cache's tensor that may hold NaN or Inf, with the same first axis."""
        return cache

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one of its blocks where plain ones hold so many tokens."""
        return math.prod(self.shape_beside(block_tokens)) * self.storage_dtype(dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class HeadsForm(CacheForm):
    """Keys and values of heads: blocks [2, kv_heads, block_tokens, width] (0 = keys, 1 = values).

    `quantized`: values of a byte or less and scales instead of the model's dtype
    (kernels/kv_write/quantized.py).
    """

    kv_heads: int
    head_dim: int
    quantized: str | None = None

    @property
    def token_width(self) -> int:
        """Elements of a token's key (or value) of one head, the bytes of its scale
        included."""
        if self.quantized is None:
            return self.head_dim
        return value_bytes(self.head_dim, self.quantized) + SCALE_BYTES

    def block_shape(self, block_tokens: int) -> tuple[int, ...]:
        """See CacheForm."""
        return (2, self.kv_heads, block_tokens, self.token_width)

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See CacheForm."""
        return torch.int8 if self.quantized else dtype

    def floats(self, cache: torch.Tensor) -> torch.Tensor:
        """See CacheForm: of quantized values the scales."""
        return values_and_scales(cache)[1] if self.quantized else cache


@dataclass(frozen=True, kw_only=True)
class LatentForm(CacheForm):
    """One vector per token, shared by all heads: blocks [block_tokens, width]. The latents of
    multi-head latent attention (width = rank + rotary dimensions), or the keys of an indexer.
    `dtype`: its own, where it is not the model's; `quantized`: values of a byte or less and two
    scales instead (kernels/latent_write/quantized.py), of a latent of `rank` elements."""

    width: int
    rank: int = 0
    kind: str = "latent"
    dtype: torch.dtype | None = None
    quantized: str | None = None

    def block_shape(self, block_tokens: int) -> tuple[int, ...]:
        """See CacheForm."""
        if self.quantized is None:
            return (block_tokens, self.width)
        values = latent_value_bytes(self.width, self.rank, self.quantized)
        return (block_tokens, values + LATENT_SCALE_BYTES)

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See CacheForm."""
        return torch.int8 if self.quantized else self.dtype or dtype

    def floats(self, cache: torch.Tensor) -> torch.Tensor:
        """See CacheForm: of quantized values the scales."""
        return latent_values_and_scales(cache)[1] if self.quantized else cache


@dataclass(frozen=True, kw_only=True)
class GroupForm(CacheForm):
    """One vector for each `group` of neighbouring positions: blocks [places, width]. A group
    divides a block or is whole blocks; then it has a larger block to itself."""

    width: int
    group: int
    kind: str = "latent"

    def block_ratio(self, block_tokens: int) -> int:
        """See CacheForm."""
        return max(1, self.group // block_tokens)

    def block_shape(self, block_tokens: int) -> tuple[int, ...]:
        """See CacheForm."""
        return (block_tokens // self.group, self.width)


@dataclass(frozen=True, kw_only=True)
class StateForm(CacheForm):
    """Recurrent state: one tensor per row of the runner. `dtype`: its own, where it is not the
    model's."""

    shape: tuple[int, ...]
    kind: str = "state"
    dtype: torch.dtype | None = None

    def block_shape(self, block_tokens: int) -> tuple[int, ...]:
        """See CacheForm."""
        return self.shape

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See CacheForm."""
        return self.dtype or dtype
