"""Paged attention in PyTorch: gather, then dense attention.

Decode rows go together: their blocks are gathered, padded to the longest row of a group, and two
batched products do the rest. Groups are cut so that the gathered KV stays within `GATHER_BYTES`,
about the share of last-level cache a core has. Rows with several queries go one by one, in tiles of
queries, each over exactly the KV positions its tile can see, so no mask of prompt length squared is
ever built. Shapes: R rows, H query heads, K KV heads, G = H/K, Q queries of a tile, S KV positions,
B blocks, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from headrace.back.kernels.kv_write.coded import widen

if TYPE_CHECKING:
    from headrace.back.kernels.attention.op import Attention, AttentionProblem, Plan

GATHER_BYTES = 16 << 20
SCORE_BYTES = 32 << 20
QUERY_TILE = 256


def bind_reference(problem: AttentionProblem, sinks_H: torch.Tensor | None = None) -> Attention:
    """The reference."""

    def attention(q_THD: torch.Tensor, kv: torch.Tensor, plan: Plan) -> torch.Tensor:
        if problem.coded:
            kv, plan = _widened(problem, kv, plan)
        out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for start, end in _decode_groups(problem, plan):
            out_THD[start:end] = _decode(problem, q_THD, kv, plan, start, end, sinks_H)
        for row in range(plan.num_decodes, len(plan.host_kv_len)):
            _prefill_row(problem, q_THD, kv, plan, row, out_THD, sinks_H)
        return out_THD

    return attention


def _widened(problem: AttentionProblem, kv: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Plan]:
    """The blocks of the plan in the dtype of the queries, and the plan with their new numbers."""
    blocks = plan.block_table_RB.unique()
    table_RB = torch.searchsorted(blocks, plan.block_table_RB).to(plan.block_table_RB.dtype)
    narrow: Any = plan
    return widen(kv[blocks.long()], problem.dtype, problem.coded), replace(
        narrow, block_table_RB=table_RB
    )


def _lowest(problem: AttentionProblem, position: int) -> int:
    """The lowest position the query at `position` sees."""
    return max(0, position - problem.window + 1) if problem.window else 0


def _decode_groups(problem: AttentionProblem, plan: Plan) -> Iterator[tuple[int, int]]:
    """Cuts the decode rows into runs whose padded gather fits in GATHER_BYTES (at least one row
    each)."""
    token_bytes = 2 * problem.kv_heads * problem.head_dim * problem.dtype.itemsize
    start, longest = 0, 0
    for row in range(plan.num_decodes):
        kv_len = int(plan.host_kv_len[row])
        visible = kv_len - _lowest(problem, kv_len - 1) + problem.block_tokens
        longest = max(longest, visible)
        if row > start and (row + 1 - start) * longest * token_bytes > GATHER_BYTES:
            yield start, row
            start, longest = row, visible
    if start < plan.num_decodes:
        yield start, plan.num_decodes


def _decode(
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: Plan,
    start: int,
    end: int,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Rows start..end with one query each, where query token i belongs to row i; returns [R, H,
    D]."""
    block_tokens, kv_heads = problem.block_tokens, problem.kv_heads
    kv_len_R = plan.kv_len_R[start:end].long()
    lowest_R = (kv_len_R - (problem.window or plan.max_kv_len)).clamp_(min=0)
    first_R = torch.div(lowest_R, block_tokens, rounding_mode="floor")
    kv_lens = [int(length) for length in plan.host_kv_len[start:end]]
    num_blocks = max(
        (kv_len - 1) // block_tokens - _lowest(problem, kv_len - 1) // block_tokens + 1
        for kv_len in kv_lens
    )
    index_RB = first_R[:, None] + torch.arange(num_blocks, device=kv.device)
    last_block = plan.block_table_RB.shape[1] - 1
    table_RB = plan.block_table_RB[start:end].gather(1, index_RB.clamp_(max=last_block))
    gathered = kv.permute(1, 2, 0, 3, 4)[:, :, table_RB.long()]
    k_KRSD, v_KRSD = gathered.view(2, kv_heads, end - start, -1, problem.head_dim).unbind(0)

    position_RS = first_R[:, None] * block_tokens + torch.arange(
        num_blocks * block_tokens, device=kv.device
    )
    hidden_RS = (position_RS < lowest_R[:, None]) | (position_RS >= kv_len_R[:, None])
    v_KRSD.masked_fill_(hidden_RS[..., None], 0.0)
    q_KRGD = q_THD[start:end].unflatten(1, (kv_heads, -1)).transpose(0, 1)
    scores = _scores(problem, q_KRGD, k_KRSD).masked_fill_(hidden_RS[:, None], float("-inf"))
    weights = _softmax(scores, sinks_H, (kv_heads, 1, -1, 1)).to(problem.dtype)
    return torch.matmul(weights, v_KRSD).transpose(0, 1).flatten(1, 2)


def _softmax(
    scores: torch.Tensor, sinks_H: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    """Over the last dimension; the sinks, viewed as `shape`, take their share and are left out."""
    if sinks_H is None:
        return scores.softmax(-1)
    sink = sinks_H.view(shape).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _scores(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled and capped scores in float32: q [..., Q, D], k [..., S, D] -> [..., Q, S]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * problem.scale
    if problem.softcap is not None:
        scores = scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
    return scores


def _prefill_row(
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: Plan,
    row: int,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> None:
    """One row with several queries, tile by tile, into its part of `out_THD`."""
    begin, end = int(plan.host_query_start[row]), int(plan.host_query_start[row + 1])
    kv_len = int(plan.host_kv_len[row])
    offset = kv_len - end
    block_tokens = problem.block_tokens
    origin = _lowest(problem, offset + begin) // block_tokens * block_tokens
    blocks = plan.block_table_RB[row, origin // block_tokens : -(-kv_len // block_tokens)].long()
    gathered = kv.permute(1, 2, 0, 3, 4)[:, :, blocks]
    k_KSD, v_KSD = gathered.view(2, problem.kv_heads, -1, problem.head_dim).unbind(0)
    tile = _tile_queries(problem, kv_len)
    for start in range(begin, end, tile):
        stop = min(start + tile, end)
        low, high = _lowest(problem, offset + start), offset + stop
        seen = slice(low - origin, high - origin)
        out_THD[start:stop] = _tile(
            problem,
            q_THD[start:stop],
            k_KSD[:, seen],
            v_KSD[:, seen],
            first_query=offset + start - low,
            sinks_H=sinks_H,
        )


def _tile_queries(problem: AttentionProblem, kv_len: int) -> int:
    if problem.softcap is None and not problem.sinks:
        return QUERY_TILE
    return max(16, min(QUERY_TILE, SCORE_BYTES // (4 * problem.heads * kv_len)))


def _tile(
    problem: AttentionProblem,
    q_QHD: torch.Tensor,
    k_KSD: torch.Tensor,
    v_KSD: torch.Tensor,
    *,
    first_query: int,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries at positions first_query .. over S positions counted from the same origin; returns
    [Q, H, D]."""
    q_KGQD = q_QHD.unflatten(1, (problem.kv_heads, -1)).permute(1, 2, 0, 3)
    query_Q1 = torch.arange(first_query, first_query + len(q_QHD), device=q_QHD.device)[:, None]
    key_S = torch.arange(k_KSD.shape[1], device=q_QHD.device)
    seen_QS = key_S <= query_Q1
    if problem.window is not None:
        seen_QS &= key_S > query_Q1 - problem.window
    shape = (problem.kv_heads, q_KGQD.shape[1], *k_KSD.shape[1:])
    k_KGSD, v_KGSD = k_KSD[:, None].expand(shape), v_KSD[:, None].expand(shape)
    if problem.softcap is None and sinks_H is None:
        out = F.scaled_dot_product_attention(
            q_KGQD, k_KGSD, v_KGSD, attn_mask=seen_QS, scale=problem.scale
        )
    else:
        scores = _scores(problem, q_KGQD, k_KGSD).masked_fill_(~seen_QS, float("-inf"))
        weights = _softmax(scores, sinks_H, (problem.kv_heads, -1, 1, 1))
        out = torch.matmul(weights.to(problem.dtype), v_KGSD)
    return out.permute(2, 0, 1, 3).flatten(1, 2)
