"""Attention inside the documents of packed rows: the plain reference and the fast way.

`prepare` runs outside of the compiled step, `attend` inside of it. They are apart for a reason: with
the block mask built inside (torch 2.11 on an H200), the forward pass was right and the gradients of
the earlier layers were wrong by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from demo.decoder import Attend

_BLOCK = 128


class Batch(NamedTuple):
    """Rows on the device, ready for the loss."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document: Tensor


Prepared = BlockMask | None


@dataclass(frozen=True)
class Attention:
    """One way to compute attention inside documents."""

    prepare: Callable[[Batch], Prepared]
    attend: Callable[[Batch, Prepared], Attend]


def _dense(batch: Batch, prepared: Prepared) -> Attend:
    document = batch.document
    T = document.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=document.device).tril()
    mask = (document[:, None, :, None] == document[:, None, None, :]) & causal

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def _flex_prepare(batch: Batch) -> Prepared:
    """The blocks from the start of a query block's first document to the diagonal."""
    document, positions = batch.document, batch.positions
    length = document.shape[1]
    blocks = length // _BLOCK
    first = torch.arange(0, length, _BLOCK, device=document.device) - positions[:, ::_BLOCK]
    low = first // _BLOCK
    each = torch.arange(blocks, device=document.device)
    count = (each - low + 1).to(torch.int32)[:, None]
    index = (low[:, :, None] + each).clamp(max=blocks - 1).to(torch.int32)[:, None]

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    return BlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=_BLOCK, mask_mod=mask, seq_lengths=(length, length)
    )


def _flex(batch: Batch, prepared: Prepared) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=prepared, enable_gqa=True)

    return attend


ATTENTIONS = {
    "dense": Attention(lambda batch: None, _dense),
    "flex": Attention(_flex_prepare, _flex),
}
