"""Attention inside the documents of packed rows: the plain reference and the ways that are fast.

`prepare` runs outside of the compiled step, where shapes may depend on the data; `attend` runs inside.
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
_MOST_DOCUMENTS = 512
"""Per row: enough for rows of nothing but small talk; more is refused, never dropped."""


class Batch(NamedTuple):
    """Rows on the device, ready for the loss."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document: Tensor


Prepared = Tensor | BlockMask | None


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
    """The blocks from a document's start to the diagonal.

    Built outside of the compiled step on purpose: compiled together with it (torch 2.11), the
    gradients of keys and values were wrong and training diverged.
    """
    document, positions = batch.document, batch.positions
    rows, length = document.shape
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


def _flex_inside(batch: Batch, prepared: Prepared) -> Attend:
    document, positions = batch.document, batch.positions
    rows, length = document.shape
    blocks = length // _BLOCK
    first = torch.arange(0, length, _BLOCK, device=document.device) - positions[:, ::_BLOCK]
    low = first // _BLOCK
    each = torch.arange(blocks, device=document.device)
    count = (each - low + 1).to(torch.int32)[:, None]
    index = (low[:, :, None] + each).clamp(max=blocks - 1).to(torch.int32)[:, None]

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    built = BlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=_BLOCK, mask_mod=mask, seq_lengths=(length, length)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=built, enable_gqa=True)

    return attend


def _varlen_prepare(batch: Batch) -> Prepared:
    """Where each document begins in the flattened rows, padded to a fixed count."""
    B, T = batch.document.shape
    starts = torch.nonzero(batch.positions.flatten() == 0).flatten().to(torch.int32)
    bounds = torch.full((B * _MOST_DOCUMENTS + 1,), B * T, dtype=torch.int32, device=starts.device)
    assert len(starts) < len(bounds), len(starts)
    bounds[: len(starts)] = starts
    return bounds


def _varlen(batch: Batch, prepared: Prepared) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    longest = batch.document.shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        group = H // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        flat = [x.transpose(1, 2).reshape(B * T, H, D) for x in (q, k, v)]
        out = varlen_attn(*flat, prepared, prepared, longest, longest, **_CAUSAL)
        return out.view(B, T, H, D).transpose(1, 2)

    return attend


def _causal_argument() -> dict[str, object]:
    """The causal flag's name changed between releases of torch."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    return {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}


_CAUSAL = _causal_argument()

ATTENTIONS = {
    "dense": Attention(lambda batch: None, _dense),
    "flex": Attention(_flex_prepare, _flex),
    "flex_inside": Attention(lambda batch: None, _flex_inside),
    "varlen": Attention(_varlen_prepare, _varlen),
}
