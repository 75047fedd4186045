"""Decode context parallelism: ranks that would hold the same KV heads hold a part of each sequence
instead. Of W such ranks token t lies on rank (t // I) % W; I is the interleave.

Here is what follows from that alone: which tokens lie where, and how the ranks' attention over
their own parts becomes the attention of each rank's heads. Per layer queries are gathered, each
rank attends for the heads of all over its positions, and results go back with their log-sum-exps:

    a2a     each rank sends every other its part for that one's heads, results and log-sum-exps
            packed as one message, and weighs what it gets
    ag_rs   log-sum-exps are gathered, each rank weighs its own results, and these are summed and
            scattered by heads

W ranks, T query tokens, H heads of a rank, D elements of a head's result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.parallel.collectives import all_parts, all_to_all, reduce_scatter
from headrace.back.parallel.mesh import ContextSplit

Partials = tuple[torch.Tensor, torch.Tensor]
"""Results, and float32 log-sum-exps without the last dimension."""


def local_lengths(length_R: torch.Tensor, split: ContextSplit) -> torch.Tensor:
    """How many of the first `length_R` tokens lie on this rank."""
    size, step = split.interleave, split.axis.size * split.interleave
    whole_R = torch.div(length_R, step, rounding_mode="floor") * size
    return whole_R + (length_R % step - split.axis.rank * size).clamp(0, size)


def local_slots(slot_T: torch.Tensor, split: ContextSplit, block_tokens: int) -> torch.Tensor:
    """Slots of tokens among blocks of `block_tokens` tokens of each rank as those among this rank's
    blocks; those of other ranks' tokens are 0, in the null block. The interleave divides blocks."""
    size, step = split.interleave, split.axis.size * split.interleave
    block_T = torch.div(slot_T, block_tokens * split.axis.size, rounding_mode="floor")
    offset_T = slot_T % (block_tokens * split.axis.size)
    own_T = torch.div(offset_T, size, rounding_mode="floor") % split.axis.size == split.axis.rank
    place_T = torch.div(offset_T, step, rounding_mode="floor") * size + offset_T % size
    return torch.where(own_T, block_T * block_tokens + place_T, 0)


def gathered_heads(q_THD: torch.Tensor, split: ContextSplit) -> torch.Tensor:
    """The queries of all ranks' heads, [T, W H, D]."""
    return torch.cat(all_parts(q_THD.contiguous(), split.axis), dim=1)


def own_heads(out_TXD: torch.Tensor, lse_TX: torch.Tensor, split: ContextSplit) -> Partials:
    """This rank's heads over all positions, of all heads [T, W H, D] over this rank's."""
    return EXCHANGES[split.exchange](out_TXD, lse_TX, split)


def merged(out_WTHD: torch.Tensor, lse_WTH: torch.Tensor) -> Partials:
    """Partial results over disjoint positions as one. A log-sum-exp that is no number, or infinite,
    is of a part that saw nothing: its values are not looked at. Where all saw nothing the result
    is zeros, its log-sum-exp -Inf."""
    weight_WTH, lse_TH = _weights(lse_WTH)
    seen_WTH1 = (weight_WTH > 0)[..., None]
    weighed_WTHD = torch.where(seen_WTH1, out_WTHD.float() * weight_WTH[..., None], 0.0)
    return weighed_WTHD.sum(0).to(out_WTHD.dtype), lse_TH


def _weights(lse_WTH: torch.Tensor) -> Partials:
    """What each part weighs, and the log-sum-exp of all."""
    lse_WTH = torch.where(lse_WTH.isfinite(), lse_WTH, float("-inf"))
    lse_TH = lse_WTH.logsumexp(0)
    top_TH = lse_TH.masked_fill(lse_TH == float("-inf"), 0.0)
    return (lse_WTH - top_TH).exp(), lse_TH


def _all_to_all(out_TXD: torch.Tensor, lse_TX: torch.Tensor, split: ContextSplit) -> Partials:
    ranks, dtype = split.axis.size, out_TXD.dtype
    out_WTHD = out_TXD.unflatten(1, (ranks, -1)).transpose(0, 1)
    lse_WTH = lse_TX.unflatten(1, (ranks, -1)).transpose(0, 1)
    heads, values = out_WTHD.shape[2:]
    parts = (_bytes(out_WTHD.flatten(2)), _bytes(lse_WTH))
    got = all_to_all(torch.cat(parts, dim=2), split.axis)
    out, lse = got.split_with_sizes([part.shape[2] for part in parts], dim=2)
    out_WTHD = out.contiguous().view(dtype).unflatten(2, (heads, values))
    return merged(out_WTHD, lse.contiguous().view(torch.float32))


def _bytes(x_WTX: torch.Tensor) -> torch.Tensor:
    return x_WTX.contiguous().view(torch.uint8)


def _gather_and_scatter(
    out_TXD: torch.Tensor, lse_TX: torch.Tensor, split: ContextSplit
) -> Partials:
    axis = split.axis
    weight_WTX, lse_TX = _weights(torch.stack(all_parts(lse_TX, axis)))
    own_TX1 = weight_WTX[axis.rank, ..., None]
    weighed_TXD = torch.where(own_TX1 > 0, out_TXD.float() * own_TX1, 0.0)
    by_rank_WTHD = weighed_TXD.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    out_THD = reduce_scatter(by_rank_WTHD, axis).to(out_TXD.dtype)
    return out_THD, lse_TX.unflatten(1, (axis.size, -1))[:, axis.rank]


EXCHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor, ContextSplit], Partials]] = {
    "a2a": _all_to_all,
    "ag_rs": _gather_and_scatter,
}
"""By the words of --dcp-comm-backend."""
