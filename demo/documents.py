"""Attention inside the documents of packed rows, causal or in both directions; see demo/attention.py for why `prepare`
runs outside of the compiled step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from demo.decoder import Attend

_BLOCK = 128


def prepare(document_BT: Tensor, *, causal: bool, plain: bool = False) -> BlockMask | Tensor:
    """What `attend` needs: blocks on CUDA, elsewhere, and if it is to be plain, the whole mask [B, 1, T, T].
    Documents are runs of equal numbers; T is a multiple of the block there."""
    if plain or not document_BT.is_cuda:
        same = document_BT[:, None, :, None] == document_BT[:, None, None, :]
        return same.tril() if causal else same
    return _blocks(document_BT, causal)


def attend(prepared: BlockMask | Tensor) -> Attend:
    """Attention by what `prepare` made."""

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=prepared, enable_gqa=True)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=prepared, enable_gqa=True)

    return dense if isinstance(prepared, Tensor) else flex


def _blocks(document: Tensor, causal: bool) -> BlockMask:
    """For each block of queries, the blocks from the start of its first document to the end of its last, or to the
    diagonal."""
    length, device = document.shape[1], document.device
    place = torch.arange(length, device=device).expand_as(document)
    opens = torch.ones_like(document, dtype=torch.bool)
    opens[:, 1:] = document[:, 1:] != document[:, :-1]
    start = torch.where(opens, place, 0).cummax(dim=1).values
    closes = opens.roll(-1, dims=1)
    closes[:, -1] = True
    end = torch.where(closes, place, length).flip(1).cummin(dim=1).values.flip(1)
    each = torch.arange(length // _BLOCK, device=device)
    low = start[:, ::_BLOCK] // _BLOCK
    high = each.expand_as(low) if causal else end[:, _BLOCK - 1 :: _BLOCK] // _BLOCK
    count = (high - low + 1).to(torch.int32)[:, None]
    index = (low[:, :, None] + each).clamp(max=len(each) - 1).to(torch.int32)[:, None]

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[b, q] == document[b, k]

    def before(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    return BlockMask.from_kv_blocks(
        count,
        index,
        BLOCK_SIZE=_BLOCK,
        mask_mod=before if causal else inside,
        seq_lengths=(length, length),
    )
